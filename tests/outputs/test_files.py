import contextlib
import os
import resource
import stat
import subprocess
import sys
import tempfile

import pytest
from support.sample_reports import report_of, tiny
from support.stored import as_nobody

from quanterr.errors import ResourceError, UsageError
from quanterr.outputs import OUTPUTS
from quanterr.outputs.files import Target, check_targets, open_target, update_section

pytestmark = pytest.mark.session

JSON = OUTPUTS[0]
BY_NAME = {output.name: output for output in OUTPUTS}

needs_full_device = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")


@pytest.fixture(scope="module")
def report():
    return report_of(tiny())


def render(file):
    file.write("new\n")


def write(target, render):
    with open_target(target, "--output-report") as file:
        render(file)


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def largest_file(n_bytes):
    """Let writes beyond so many bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


# Checks before the work


@pytest.mark.parametrize("name", ["report.json", "report.JSON", ".hidden.json", "größe.json", "a b.json"])
def test_suffix_chooses_the_output(tmp_path, name):
    assert [Target(JSON, tmp_path / name)] == check_targets([str(tmp_path / name)], [])


def test_dash_means_json_on_standard_output():
    assert [Target(JSON, None)] == check_targets(["-"], [])


def test_existing_file_is_kept_if_asked(tmp_path):
    existing, new = tmp_path / "there.json", tmp_path / "new.json"
    existing.write_text('{"schema": "quanterr.report"}')

    assert [new, None] == [target.path for target in check_targets([str(new), "-"], [], no_clobber=True)]
    with pytest.raises(ResourceError, match=r"there\.json: already exists \(--no-clobber\)"):
        check_targets([str(new), str(existing)], [], no_clobber=True)


def test_several_outputs_keep_their_order(tmp_path):
    targets = check_targets([str(tmp_path / "b.json"), "-", str(tmp_path / "a.json")], [])

    assert [tmp_path / "b.json", None, tmp_path / "a.json"] == [target.path for target in targets]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_each_suffix_has_its_output_and_each_output_its_name(tmp_path, output):
    path = tmp_path / f"report{output.suffix}"

    assert [Target(output, path)] == check_targets([str(path)], [])


def test_output_may_be_chosen_for_any_suffix(tmp_path):
    html = BY_NAME["html"]

    assert [Target(html, tmp_path / "page"), Target(html, None)] == check_targets(
        [str(tmp_path / "page"), "-"], [], html
    )


@pytest.mark.parametrize("name", ["report.pdf", "report", "json", "report.json.", "report.jso\x1b"])
def test_unknown_suffix_is_refused_with_the_known_ones(tmp_path, name):
    with pytest.raises(UsageError, match=r"unknown suffix; choose one of \.json, .* or - for stdout") as raised:
        check_targets([str(tmp_path / name)], [])

    assert 2 == raised.value.status
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_input_is_never_overwritten(tmp_path, link):
    model, output = tmp_path / "model.json", tmp_path / "report.json"
    model.write_text("weights")
    if link is None:
        output = tmp_path / "." / "model.json"
    else:
        link(model, output)

    with pytest.raises(UsageError, match="is an input") as raised:
        check_targets([str(output)], ["elsewhere.safetensors", str(model)])

    assert 2 == raised.value.status


@pytest.mark.parametrize("earlier", [False, True])
def test_checkpoint_folders_are_never_written_into(tmp_path, report, earlier):
    folder = tmp_path / "model"
    (folder / "reports").mkdir(parents=True)
    if earlier:
        write(Target(JSON, folder / "report.json"), lambda file: JSON.write(report, file))

    with pytest.raises(UsageError, match="is in the folder of an input checkpoint"):
        check_targets([str(folder / "report.json")], ["elsewhere.safetensors", str(folder)])
    inside = folder / "reports" / "report.json"
    assert [Target(JSON, inside)] == check_targets([str(inside)], [str(folder)])


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_only_empty_files_and_own_outputs_may_be_replaced(tmp_path, report, output):
    path = tmp_path / "mine.md"
    path.write_text("")
    assert [Target(output, path)] == check_targets([str(path)], [], output)
    for other in OUTPUTS:
        write(Target(output, path), lambda file, other=other: other.write(report, file))
        assert [Target(output, path)] == check_targets([str(path)], [], output)

    for text in ("mine", "\n", "# quanterr\n", '{"tool": "quanterr"}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="already exists, and quanterr did not write it; ") as raised:
            check_targets([str(path)], [], output)
        assert 2 == raised.value.status


def test_non_document_output_may_be_replaced(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")

    assert [Target(JSON, path)] == check_targets([str(path)], [])


def test_document_beginning_with_a_section_is_foreign(tmp_path, report):
    path = tmp_path / "README.md"
    write(Target(BY_NAME["md"], path), lambda file: BY_NAME["md"].write(report, file))
    assert [Target(BY_NAME["md"], path)] == check_targets([str(path)], [])
    path.write_text(path.read_text() + "my own words\n")

    for output in OUTPUTS:
        with pytest.raises(UsageError, match=r"already exists, and quanterr did not write it; "):
            check_targets([str(path)], [], output)
    with pytest.raises(UsageError, match=r"quanterr render REPORT --update .*README\.md"):
        check_targets([str(path)], [])


def test_standard_output_carries_one_document():
    for given in (["-", "-"], ["-", "/dev/stdout"]):
        with pytest.raises(UsageError, match="standard output can hold only one document"):
            check_targets(given, [])


def test_folder_cannot_be_an_output(tmp_path):
    (tmp_path / "report.json").mkdir()

    with pytest.raises(UsageError, match="is a folder"):
        check_targets([str(tmp_path / "report.json")], [])


def test_missing_folder_is_noticed_before_the_work(tmp_path):
    with pytest.raises(ResourceError, match=r"no such folder: .*reports") as raised:
        check_targets([str(tmp_path / "reports" / "report.json")], [])

    assert 5 == raised.value.status


def test_file_cannot_serve_as_a_folder(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ResourceError, match="no such folder"):
        check_targets([str(tmp_path / "file" / "report.json")], [])


def test_read_only_folder_is_noticed_before_the_work():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        with as_nobody(), pytest.raises(ResourceError, match="no permission to write there") as raised:
            check_targets([f"{folder}/report.json"], [])

    assert 5 == raised.value.status


def test_checking_creates_no_file(tmp_path):
    check_targets([str(tmp_path / "report.json")], [])

    assert [] == os.listdir(tmp_path)


# Writing


def test_report_is_written_whole(tmp_path):
    path = tmp_path / "report.json"

    write(Target(JSON, path), render)

    assert "new\n" == path.read_text()
    assert ["report.json"] == os.listdir(tmp_path)


def test_earlier_report_is_replaced(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("something much longer than the new one")

    write(Target(JSON, path), render)

    assert "new\n" == path.read_text()


def test_standard_output_gets_the_document(capsys):
    write(Target(JSON, None), render)

    assert ("new\n", "") == capsys.readouterr()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0, 0o666)])
def test_new_report_has_the_umask_mode(tmp_path, mask, mode):
    path = tmp_path / "report.json"

    with umask(mask):
        write(Target(JSON, path), render)
        mask_after = os.umask(mask)

    assert mode == mode_of(path)
    assert mask == mask_after


def test_earlier_report_keeps_its_mode(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    path.chmod(0o604)

    write(Target(JSON, path), render)

    assert 0o604 == mode_of(path)


@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_link_stays_a_link(tmp_path, exists):
    (tmp_path / "there").mkdir()
    path, real = tmp_path / "report.json", tmp_path / "there" / "real.json"
    if exists:
        real.write_text('{"schema": "quanterr.report"}')
    path.symlink_to(real)

    write(*check_targets([str(path)], []), render)

    assert path.is_symlink()
    assert "new\n" == real.read_text()
    assert (["real.json"], {"report.json", "there"}) == (os.listdir(real.parent), set(os.listdir(tmp_path)))


def test_document_gets_the_section_between_its_comments(tmp_path, report):
    path, link = tmp_path / "model-card.md", tmp_path / "README.md"
    path.write_bytes("# Größe\r\n<!-- quanterr:begin -->\r\nold\r\n<!-- quanterr:end -->\r\nafter".encode())
    path.chmod(0o640)
    link.symlink_to(path)

    update_section(str(link), report, BY_NAME["md"])

    assert path.read_bytes().startswith("# Größe\r\n<!-- quanterr:begin -->\r\n## Weight fidelity\r\n".encode())
    assert path.read_bytes().endswith(b"<!-- quanterr:end -->\r\nafter")
    assert (True, 0o640) == (link.is_symlink(), mode_of(path))


@pytest.mark.parametrize("text", [None, b"", b"no comments", b"<!-- quanterr:begin -->\n", b"\xff\xfe"])
def test_document_without_room_for_it_stays_untouched(tmp_path, report, text):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_bytes(text)

    with pytest.raises(UsageError, match=r"--update .*README\.md: "):
        update_section(str(path), report, BY_NAME["md"])

    assert text is None or text == path.read_bytes()


def test_full_disk_leaves_the_document_untouched(tmp_path, report):
    path = tmp_path / "README.md"
    path.write_text("<!-- quanterr:begin -->\n<!-- quanterr:end -->\n")
    before = path.read_text()

    with largest_file(100), pytest.raises(ResourceError):
        update_section(str(path), report, BY_NAME["md"])

    assert before == path.read_text()
    assert ["README.md"] == os.listdir(tmp_path)


# Failures while writing


def test_full_disk_leaves_the_earlier_report_untouched(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")

    with largest_file(100), pytest.raises(ResourceError, match=r"report\.json: ") as raised:
        write(Target(JSON, path), lambda file: file.write("x" * 100_000))

    assert 5 == raised.value.status
    assert "old" == path.read_text()
    assert ["report.json"] == os.listdir(tmp_path)


@needs_full_device
def test_full_device_is_an_environment_error():
    with pytest.raises(ResourceError, match="/dev/full: No space left on device") as raised:
        write(*check_targets(["/dev/full"], []), render)

    assert 5 == raised.value.status


@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt])
def test_failure_while_rendering_leaves_no_file(tmp_path, failure):
    def fail(file):
        file.write("half")
        raise failure

    with pytest.raises(failure):
        write(Target(JSON, tmp_path / "report.json"), fail)

    assert [] == os.listdir(tmp_path)


def test_vanished_folder_is_an_environment_error(tmp_path):
    with pytest.raises(ResourceError, match="No such file or directory"):
        write(Target(JSON, tmp_path / "gone" / "report.json"), render)


# Writing through pipes and devices


def test_pipe_is_written_through_and_stays(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(*check_targets([str(path)], []), render)

        assert b"new\n" == os.read(reader, 100)
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert ["pipe"] == os.listdir(tmp_path)


def test_device_is_written_through_and_stays():
    write(*check_targets([os.devnull], []), render)

    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="there is no /dev/stdout here")
def test_standard_output_may_be_given_by_its_path():
    code = "with open_target(*check_targets(['/dev/stdout'], []), '-o') as file: file.write('new')"
    command = [sys.executable, "-c", f"from quanterr.outputs.files import *\n{code}"]

    done = subprocess.run(command, capture_output=True, timeout=60)

    assert (0, b"new", b"") == (done.returncode, done.stdout, done.stderr)
