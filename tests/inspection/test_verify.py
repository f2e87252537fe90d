"""Checksums from the hub for its local cache and downloads; tests/checkpoints/test_remote.py uses a hub itself."""

from hashlib import sha256

import pytest
from support.making import numbers, store

import quanterr
from quanterr.checkpoints import checksums
from quanterr.errors import UsageError


@pytest.fixture
def file(tmp_path):
    return store(tmp_path / "m.safetensors", {"a.weight": numbers(64, 128)})


def digest(path):
    return sha256(path.read_bytes()).hexdigest()


def cache(file, name):
    """Store the file as a blob of this name in the local cache, and return the link in its snapshot."""
    blobs, snapshot = file.parent / "blobs", file.parent / "snapshots" / "c0ffee"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    file.rename(blobs / name)
    (snapshot / file.name).symlink_to(blobs / name)
    return snapshot / file.name


def note(file, etag):
    """Write the note that huggingface_hub leaves for a download."""
    folder = file.parent / ".cache/huggingface/download"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{file.name}.metadata").write_text(f"{'c0ffee' * 6}abcd\n{etag}\n1712656091.123\n")
    return file


@pytest.mark.parametrize("place", [cache, note])
def test_matching_checksum_is_verified(file, place, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 1000)
    inspection = quanterr.inspect(place(file, digest(file)), verify=True)

    assert (1, []) == (inspection.verified, inspection.findings)
    assert inspection.run.read_bytes > 64 * 128 * 2


@pytest.mark.parametrize("place", [cache, note])
def test_mismatched_checksum_is_an_error_with_both_values(file, place):
    actual, stated = digest(file), "a" * 64
    path = place(file, stated)
    inspection = quanterr.inspect(path, verify=True)
    (finding,) = inspection.findings

    assert (0, "checksum_mismatch", "error") == (inspection.verified, finding.code, finding.severity)
    assert f"{path}: its SHA-256 is {actual}, and the hub states {stated}" in finding.message
    assert inspection.problems


@pytest.mark.parametrize("etag", [None, "11c5a3d5811f50298f278a704980280950aedb10", "not a checksum"])
def test_verifying_without_a_stated_checksum_is_wrong_usage(file, etag):
    with pytest.raises(UsageError, match="no checksum to verify"):
        quanterr.inspect(note(file, etag) if etag else file, verify=True)


def test_shards_without_a_checksum_are_a_warning(tmp_path):
    shards = [store(tmp_path / f"m-0000{n}-of-00002.safetensors", {f"{n}.weight": numbers(64, 128)}) for n in (1, 2)]
    note(shards[0], digest(shards[0]))
    inspection = quanterr.inspect(tmp_path, verify=True)

    assert (1, ["warning"]) == (inspection.verified, [finding.severity for finding in inspection.findings])
    assert "no SHA-256 for 1 file: m-00002-of-00002.safetensors" in inspection.findings[0].message


def test_verification_is_off_by_default(file):
    assert [] == quanterr.inspect(note(file, "a" * 64)).findings
