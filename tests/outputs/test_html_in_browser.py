"""The HTML page in a real browser: sorting, filters, the keyboard, all themes; and names are only text."""

import re
import shlex
import time
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from support.browsing import BROWSER, DRIVER, start_browser
from support.making import numbers, quantized_fp8, quantized_int8, store
from support.sample_documents import inspection, plan
from support.sample_reports import hostile, large_page, make_mixed, report_of, small

import quanterr
from quanterr.outputs.page import rendering as html

pytestmark = [
    pytest.mark.session,
    pytest.mark.skipif(
        not (BROWSER and DRIVER),
        reason="no Chromium with its driver here (Debian: apt install chromium chromium-driver)",
    ),
]


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium", reason="selenium is not installed (pip install -e '.[dev]')")
    with start_browser() as driver:
        yield driver


class Page:
    """A report that is open in the browser."""

    def __init__(self, browser, path, ready="#rows tr[data-place]"):
        self.browser = browser
        browser.get_log("browser")  # leftovers of other tests
        started = time.monotonic()
        browser.get(path.as_uri())
        self.wait(f"return document.querySelectorAll('{ready}').length > 0")
        self.seconds = time.monotonic() - started

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, script, seconds=20):
        deadline = time.monotonic() + seconds
        while not (finished := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}; {self.complaints()}"
            time.sleep(0.02)
        return finished

    def complaints(self):
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def press(self, *keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()  # to the focused element: rows are made anew

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def column(self, n):
        """Return cells of the rows that are currently elements."""
        rows = "[...document.querySelectorAll('#rows tr[data-place]')]"
        return self.run(f"return {rows}.map(row => row.cells[arguments[0]].textContent)", n)

    def type(self, text):
        self.set("#search", text, "input")

    def choose(self, selector, value):
        self.set(selector, value, "change")

    def set(self, selector, value, event):
        script = "const e = document.querySelector(arguments[0]); e.value = arguments[1]; "
        self.run(script + "e.dispatchEvent(new Event(arguments[2]))", selector, value, event)


@contextmanager
def open_page(browser, path, **ready):
    """Open a page; no test may leave anything in the console, such as a violation of the policy."""
    page = Page(browser, path, **ready)
    yield page
    assert [] == page.complaints()


def write(folder, report):
    path = folder / "report.html"
    with path.open("w", encoding="utf-8") as file:
        html.write(report, file)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pages by name: each test opens one anew, but they are written once."""
    reports = {"small": report_of(small()), "mixed": report_of(make_mixed()), "hostile": hostile()}
    return {name: write(tmp_path_factory.mktemp(name), report) for name, report in reports.items()}


@pytest.fixture
def page(browser, files):
    """A small model with one bad layer."""
    with open_page(browser, files["small"]) as page:
        yield page


@pytest.fixture
def partial(browser, files):
    """A model with two formats and two stacks in which two tensors were not compared."""
    with open_page(browser, files["mixed"]) as page:
        yield page


@pytest.fixture
def evil(browser, files):
    with open_page(browser, files["hostile"]) as page:
        yield page


@pytest.fixture(scope="module")
def many(browser, tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "report.html"
    path.write_text(large_page(), encoding="utf-8")
    with open_page(browser, path) as page:
        yield page


class TestTable:
    def test_worst_layers_come_first(self, page):
        assert "model.layers.11.mlp.down_proj.weight" == page.column(0)[0]
        assert "145 tensors, the worst first by SNR" == page.text("#count")
        assert "ascending" == page.run("return document.querySelector('th[aria-sort]').getAttribute('aria-sort')")

    def test_uncompared_tensors_come_before_the_worst(self, partial):
        assert ["not compared", "not compared"] == partial.column(4)[:2]
        assert partial.column(4)[2].startswith("26.")

    def test_clicking_a_head_sorts_and_clicking_again_reverses(self, page):
        page.click("#columns [data-key=max_absolute_error] button")
        falling = [float(text) for text in page.column(7)]
        page.click("#columns [data-key=max_absolute_error] button")

        assert falling == sorted(falling, reverse=True)
        assert "ascending" == page.run("return document.querySelector('th[aria-sort]').getAttribute('aria-sort')")
        assert "identical" == page.column(4)[0]

    def test_names_are_sorted_by_their_numbers(self, page):
        page.click("#columns [data-key=name] button")
        page.type("q_proj")

        assert [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(16)] == page.column(0)

    def test_words_filter_and_a_marked_word_excludes(self, page):
        page.type("layers.3. !mlp !norm")

        assert {f"model.layers.3.self_attn.{x}_proj.weight" for x in "qkvo"} == set(page.column(0))
        assert page.text("#count").startswith("4 of 145 tensors")

    def test_empty_search_result_is_explained(self, page):
        page.type("nothing like that")

        assert [] == page.column(0)
        assert page.text("#count").startswith("0 of 145 tensors")
        assert "None." in page.text("#rows")

    def test_status_role_and_format_filter_rows(self, partial):
        partial.choose("#status", "3")
        lost = partial.column(0)
        partial.choose("#status", "")
        partial.choose("#format", "int8_row")
        partial.choose("#role", "other")

        assert ["double_blocks.7.txt_mlp.2.weight", "final_layer.linear.weight"] == lost
        assert all("mod" in name for name in partial.column(0))
        partial.click("#reset")
        assert partial.text("#count").startswith("609 tensors")

    def test_only_visible_rows_are_elements(self, partial):
        assert len(partial.column(0)) < 60
        assert "610" == partial.run("return document.getElementById('table').getAttribute('aria-rowcount')")

        partial.run("document.getElementById('viewport').scrollTop = 1e9")
        partial.wait("return document.querySelector('#rows tr[aria-rowindex=\"610\"]')")

        assert "identical" == partial.column(4)[-1]


class TestUndefined:
    @pytest.fixture
    def spoilt(self, browser, tmp_path):
        report = report_of(make_mixed())
        layer = report.layers[20]
        layer.snr_db, layer.nonfinite = None, {"snr_db": "nan"}
        with open_page(browser, write(tmp_path, report)) as page:
            yield page, layer.layer_name

    def test_undefined_number_is_worse_than_any_other(self, spoilt):
        page, name = spoilt

        assert ["not compared", "not compared", "undefined"] == page.column(4)[:3]
        assert name == page.column(0)[2]

    def test_undefined_number_is_visible_in_the_map_and_next_to_the_bars(self, spoilt):
        page, _ = spoilt
        cells = page.run("return [...document.querySelectorAll('td.unsound')].map(e => e.textContent)")
        bars = page.run("return [...document.querySelectorAll('.bars .undefined')].map(e => e.ariaLabel)")

        assert ["!"] == cells
        assert ["fp8_row, undefined: 1 layer"] == bars

    def test_undefined_number_is_shown_as_nan(self, spoilt):
        page, _ = spoilt
        page.run("document.querySelectorAll('#rows button')[2].click()")

        assert "nan" in page.text("#details-body table")


class TestAddress:
    WORST = "model.layers.11.mlp.down_proj.weight"

    def list_drawn(self, page):
        return page.run(
            "return document.getElementById('details').open && document.querySelector('h2#details-name')?.textContent"
        )

    def test_every_layer_name_leads_to_its_details(self, page):
        places = (".reasons", ".figures", "#gates .why", "#findings")
        for place in places:
            page.click(f"{place} a.layer")
            assert self.WORST == self.list_drawn(page), place
            page.click("#close")

    def test_names_of_uncompared_tensors_lead_to_their_details(self, partial):
        partial.click(".problems a.layer")

        assert "double_blocks.7.txt_mlp.2.weight" == self.list_drawn(partial)

    def test_address_stores_and_restores_the_view(self, page, tmp_path):
        page.type("down_proj")
        page.choose("#role", "mlp")
        page.click("#rows button")
        address = page.run("return location.href")
        page.browser.get("about:blank")
        page.browser.get(address)
        page.wait("return document.getElementById('details').open")

        assert address.endswith(f"#q=down_proj&role=mlp&layer={self.WORST}")
        assert self.WORST == self.list_drawn(page)
        assert page.text("#count").startswith("16 of 145 tensors")
        assert "down_proj" == page.run("return document.getElementById('search').value")

    def test_address_is_plain_again_after_a_reset(self, page):
        page.type("down_proj")
        page.click("#rows button")
        page.click("#close")
        page.wait("return !location.hash.includes('layer')")
        page.click("#reset")

        assert "" == page.run("return location.hash")

    def test_address_with_an_unknown_layer_opens_no_details(self, page):
        page.run("location.hash = '#layer=no.such.layer'")
        page.run("location.hash = '#layer='")

        assert not self.list_drawn(page)

    def test_section_links_change_no_filter(self, page):
        page.type("down_proj")
        page.click("nav a[href='#coverage']")

        assert page.text("#count").startswith("16 of 145 tensors")


class TestCopying:
    def test_layer_name_can_be_copied(self, page):
        self.clipboard(page)
        page.click("#rows button")
        page.click("#copy-name")
        page.wait("return document.getElementById('copy-name').textContent === 'Copied'")

        assert TestAddress.WORST == page.run("return window.copied")

    def test_shown_rows_can_be_saved_as_csv_in_their_order(self, page):
        import csv

        page.run("URL.createObjectURL = (blob) => (blob.text().then((text) => (window.saved = text)), 'blob:none')")
        page.run("HTMLAnchorElement.prototype.click = function () { window.file = this.download; }")
        page.type("/^model.layers.1[15].*down/")
        page.click("#csv")
        rows = list(csv.DictReader(page.wait("return window.saved").splitlines()))

        assert "layers.csv" == page.run("return window.file")
        assert page.column(0) == [row["name"] for row in rows]
        assert ("differ", "4.12", "2048 × 8192") == tuple(rows[0][key] for key in ("status", "snr_db", "shape"))
        assert "mean_absolute_error" in rows[0]

    def test_formula_is_only_text(self, evil):
        evil.run("URL.createObjectURL = (blob) => (blob.text().then((text) => (window.saved = text)), 'blob:none')")
        evil.run("HTMLAnchorElement.prototype.click = function () {}")
        evil.click("#csv")

        assert not [line for line in evil.wait("return window.saved").splitlines() if line.startswith('"=')]

    def clipboard(self, page):
        page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")


class TestFilters:
    def test_regular_expression_filters_rows(self, page):
        page.type("/layers\\.(3|4)\\.mlp/")

        assert page.text("#count").startswith("6 of 145 tensors")

    def test_invalid_regular_expression_selects_no_row(self, page):
        page.type("/layers(/")

        assert page.text("#count").startswith("Not a regular expression")
        assert [] == page.column(0)
        assert not page.run("return document.getElementById('search').checkValidity()")

    def test_layers_with_a_finding_can_be_selected(self, page):
        page.choose("#finding", "implausible_error")

        assert [TestAddress.WORST] == page.column(0)

    def test_columns_can_be_chosen(self, page):
        heads = "return [...document.querySelectorAll('#columns th')].map((th) => th.textContent)"
        page.click("#chooser input[value=role]")
        shown = page.run(heads)

        assert "Mean |e|" in shown
        assert "Role" not in shown
        assert len(shown) == len(
            page.run("return [...document.querySelector('#rows tr[data-place]').cells].map(() => 1)")
        )


class TestKeep:
    def test_keep_section_shows_gain_and_cost_for_the_first_layers(self, page):
        assert page.text("#keep-answer").startswith(
            "1 layer makes 90 % of the error. Kept in BF16, the file grows by 0.678 % (15.99 MiB), "
            "SNR 21.30 → 31.32 dB."
        )
        assert TestAddress.WORST == page.run("return document.getElementById('keep-list').value")

    def test_keep_section_counts_more_layers_by_keyboard(self, page):
        from selenium.webdriver.common.keys import Keys

        page.run("document.getElementById('keep-range').focus()")
        page.press(Keys.ARROW_RIGHT)

        assert page.text("#keep-answer").startswith("2 layers make 90.")
        assert "2 layers" == page.run("return document.getElementById('keep-range').getAttribute('aria-valuetext')")

    def test_clicking_a_curve_selects_layers_and_the_table_shows_them(self, page):
        page.run(
            "const svg = document.getElementById('keep-bytes'); const { left, width } = svg.getBoundingClientRect();"
            "svg.dispatchEvent(new MouseEvent('click', { clientX: left + width / 2, bubbles: true }))"
        )
        n = int(page.run("return document.getElementById('keep-range').value"))
        page.click("#keep-answer button")

        assert 30 < n < 90
        assert page.text("#count").startswith(f"{n} of 145 tensors")
        assert f"{n} layers" in page.run("return document.getElementById('keep-layers').getAttribute('aria-label')")

    @pytest.mark.parametrize(
        ("syntax", "text"),
        [
            ("convert_to_quant", r"--exclude-layers '^(model\.layers\.11\.mlp\.down_proj\.weight)$'"),
            ("llmcompressor", 'ignore:\n  - "model.embed_tokens"\n  - "model.layers.11.mlp.down_proj"'),
            ("llama-quantize", r"--tensor-type '^blk\.11\.ffn_down\.weight$=bf16'"),
        ],
    )
    def test_keep_list_uses_the_chosen_syntax(self, page, syntax, text):
        page.choose("#keep-syntax", syntax)

        assert text == page.run("return document.getElementById('keep-list').value")

    def test_program_that_wrote_the_file_gets_a_complete_command(self, browser, tmp_path):
        """The command quantizes what the file quantizes, except the kept layer, and nothing that stayed in BF16."""
        made = report_of(small())
        original = replace(made.original, path="its $ original.safetensors")
        made = replace(made, original=original)
        for layer in made.layers:
            layer.comfy_format = "float8_e4m3fn_rowwise"
        with open_page(browser, write(tmp_path, made)) as page:
            program = page.run("return document.getElementById('keep-syntax').value")
            command = page.run("return document.getElementById('keep-list').value")
            shown = page.text("#keep-copy")
        *start, pattern, option, output = shlex.split(command.replace("\\\n", ""))
        stored = [*(layer.layer_name for layer in (*made.layers, *made.lossless)), "text_encoder.layers.0.weight"]

        assert ("convert_to_quant", "Copy command") == (program, shown)
        assert [
            *["convert_to_quant", "-i", "its $ original.safetensors", "--comfy_quant", "--scaling_mode", "row"],
            "--exclude-layers",
        ] == start
        assert ("-o", "kept.safetensors") == (option, output)
        assert [
            "model.layers.11.mlp.down_proj.weight",
            *(layer.layer_name for layer in made.lossless),
            "text_encoder.layers.0.weight",
        ] == [name for name in stored if re.search(pattern, name)]

    def test_llama_quantize_keeps_the_same_layers_as_the_compared_file(self, browser, tmp_path):
        made = report_of(small())
        made.original = replace(made.original, path="a model/")
        for layer in made.layers:
            layer.format = "gguf_q4_k"
        for layer in made.lossless:
            layer.format = "gguf_f16"
        with open_page(browser, write(tmp_path, made)) as page:
            making, command = page.run("return document.getElementById('keep-list').value").split("\n", 1)

        assert "convert_hf_to_gguf.py 'a model/' --outfile original.gguf --outtype bf16" == making
        assert [
            "llama-quantize",
            *["--tensor-type", r"^token_embd\.weight$=f16", "--tensor-type", r"^blk\.11\.ffn_down\.weight$=bf16"],
            *["original.gguf", "kept.gguf", "Q4_K_M"],
        ] == shlex.split(command.replace("\\\n", ""))

    def test_unworkable_list_is_not_offered(self, partial):
        offered = "return [...document.getElementById('keep-syntax').options].map((one) => one.value)"

        assert "llama-quantize" not in partial.run(offered)


class TestKeyboard:
    def find_focus(self, page):
        return page.run("return document.activeElement.textContent")

    def test_slash_leads_to_the_filter_and_down_to_the_rows(self, page):
        from selenium.webdriver.common.keys import Keys

        page.press("/")
        assert "search" == page.run("return document.activeElement.id")
        page.press("k_proj")
        page.press(Keys.ARROW_DOWN)
        first = self.find_focus(page)
        page.press(Keys.ARROW_DOWN)

        assert first != self.find_focus(page)
        assert "k_proj" in self.find_focus(page)

    def test_end_home_and_page_keys_scroll_and_keep_the_focus(self, partial):
        from selenium.webdriver.common.keys import Keys

        partial.run("document.querySelector('#rows button').focus()")
        partial.press(Keys.END)
        assert "609" == partial.run("return String(Number(document.activeElement.closest('tr').dataset.place) + 1)")
        partial.press(Keys.PAGE_UP)
        assert int(partial.run("return document.activeElement.closest('tr').dataset.place")) < 608
        partial.press(Keys.HOME)
        assert partial.column(0)[0] == self.find_focus(partial)

    def test_enter_opens_the_details_and_escape_leads_back(self, page):
        from selenium.webdriver.common.keys import Keys

        page.run("document.querySelector('#rows button').focus()")
        page.press(Keys.ENTER)
        page.wait("return document.getElementById('details').open")
        page.press("j")
        page.press(Keys.ESCAPE)

        # A closing dialog returns the focus to its opener; the page moves it on in a later task, by "close".
        page.wait("return document.activeElement.textContent === 'model.layers.15.mlp.down_proj.weight'")
        assert not page.run("return document.getElementById('details').open")

    def test_arrows_move_in_the_map_and_enter_shows_the_layer(self, page):
        from selenium.webdriver.common.keys import Keys

        page.run("document.querySelector('.map td.cell[tabindex=\"0\"]').focus()")
        assert "model.layers.0 mlp.down_proj: 29.29 dB" == page.text("#place-readout")
        page.press(Keys.ARROW_RIGHT)
        page.press(Keys.ARROW_DOWN)
        assert page.text("#place-readout").startswith("model.layers.1 mlp.gate_proj: 3")
        page.press(Keys.ENTER)
        page.wait("return document.getElementById('details').open")

        assert "model.layers.1.mlp.gate_proj.weight" == page.text("#details-name")
        page.press(Keys.ESCAPE)
        page.wait("return document.activeElement.matches('.map td.cell')")
        assert page.text("#count").startswith("145 tensors")

    def test_arrows_move_along_the_bars(self, page):
        from selenium.webdriver.common.keys import Keys

        page.run("document.querySelector('.bars button[tabindex=\"0\"]').focus()")
        assert "fp8_row, 4 to 5 dB: 1 layer" == page.text("#bar-readout")
        page.press(Keys.ARROW_RIGHT)
        assert page.text("#bar-readout").startswith("fp8_row, 28 to")

    def test_every_control_has_a_name(self, partial):
        nameless = partial.run(
            "return [...document.querySelectorAll('button, select, input')].filter(e => !e.textContent.trim() "
            "&& !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.outerHTML)"
        )

        assert [] == nameless


class TestDetails:
    def test_details_show_every_metric_with_its_definition_and_the_finding(self, page):
        page.click("#rows button")
        page.wait("return document.getElementById('details').open")
        details = page.text("#details-body")

        assert "model.layers.11.mlp.down_proj.weight: 4.1 dB as fp8_row" in details
        for text in ("cosine similarity", "10·log10(Σx² / Σe²)", "Percentiles of |e|", "Worst rows", "Largest error"):
            assert text in details

    def test_details_compare_the_layer_with_its_peers_and_price_keeping_it(self, page):
        page.click("#rows button")
        page.wait("return document.getElementById('details').open")
        context = page.text(".context")

        assert "other layers of role mlp in fp8_row usually have" in context
        assert re.search(r"This layer is \d+\.\d dB below\.", context)
        assert "Keeping it unquantized removes 90" in context

    def test_details_explain_why_a_tensor_was_not_compared(self, partial):
        partial.click("#rows button")

        assert "its scale double_blocks.7.txt_mlp.2.weight_scale is missing" in partial.text("#details-body")


class TestPictures:
    def test_map_has_a_table_for_each_stack_and_shows_the_bad_cell(self, partial):
        maps = partial.run("return [...document.querySelectorAll('.map figcaption')].map(e => e.textContent.trim())")
        lost = partial.run("return [...document.querySelectorAll('td.lost')].map(e => e.getAttribute('aria-label'))")

        assert ["double_blocks", "single_blocks"] == maps
        assert ["double_blocks.7 txt_mlp.2: not compared"] == lost

    def test_map_can_show_other_metrics(self, partial):
        before = partial.text("#place-legend")
        partial.choose("#place-metric", "max_absolute_error")

        assert before != partial.text("#place-legend")
        assert "not compared" in partial.text("#place-legend")

    def test_bar_filters_the_table_and_a_button_resets_it(self, partial):
        several = "find(bar => / [1-9][0-9]+ layers/.test(bar.ariaLabel))"
        partial.run(f"[...document.querySelectorAll('.bars button')].{several}.click()")
        shown = partial.text("#count")
        partial.click(".chip")

        assert "of 609" in shown
        assert partial.text("#count").startswith("609 tensors")

    def test_worse_cells_are_darker_in_light_and_lighter_in_dark(self, page):
        def lightness():
            return page.run("""
                return [...Array(9).keys()].map(n => {
                  const e = document.body.appendChild(document.createElement('i'));
                  e.className = `h${n}`;
                  const [r, g, b] = getComputedStyle(e).backgroundColor.match(/[0-9.]+/g).map(Number);
                  e.remove();
                  return 0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2;
                });""")

        page.run("document.documentElement.dataset.theme = 'light'")
        assert lightness() == sorted(lightness(), reverse=True)
        page.run("document.documentElement.dataset.theme = 'dark'")
        assert lightness() == sorted(lightness())


class TestThemesAndSizes:
    def ground(self, page):
        return page.run("return getComputedStyle(document.body).backgroundColor")

    def test_theme_button_cycles_through_auto_light_and_dark(self, page):
        seen = []
        for _ in range(3):
            page.click("#theme")
            seen.append((page.text("#theme"), self.ground(page)))

        assert ["Theme: light", "Theme: dark", "Theme: auto"] == [text for text, _ in seen]
        assert seen[0][1] != seen[1][1]

    def test_auto_theme_follows_the_system(self, page):
        grounds = []
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            grounds.append(self.ground(page))
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

        assert grounds[0] != grounds[1]

    def test_sections_fold_and_the_answer_comes_before_the_map(self, page):
        order = page.run(
            "return [...document.querySelectorAll('main > section, main > details')].map((e) => e.id || e.className)"
        )
        page.click("#findings > summary")

        assert ["verdict inconclusive", "summary", "gates", "findings", "keep", "places", "coverage"] == order[:7]
        assert not page.run("return document.getElementById('findings').open")
        links = "return [...document.querySelectorAll('nav a')].map((e) => document.querySelector(e.hash) !== null)"
        assert {True} == set(page.run(links))

    def test_telephone_page_truncates_no_text(self, page):
        size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        cut = page.run(
            "const free = 'svg, .viewport, .spoken, .map, textarea';"
            "return [...document.querySelectorAll('main *')].filter((e) => !e.closest(free)"
            " && e.scrollWidth > e.clientWidth + 1 && e.clientWidth && getComputedStyle(e).overflowX !== 'visible')"
            ".map((e) => e.outerHTML.slice(0, 80))"
        )
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

        assert [] == cut

    @pytest.mark.parametrize("width", [390, 760, 1600])
    def test_page_fits_its_width(self, partial, width):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        partial.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        finished = partial.run("return document.documentElement.scrollWidth")
        partial.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

        assert finished <= width

    def test_print_has_the_first_rows_and_their_total(self, partial):
        partial.run("window.dispatchEvent(new Event('beforeprint'))")
        printed, row_count = len(partial.column(0)), partial.text("#rows")
        partial.run("window.dispatchEvent(new Event('afterprint'))")

        assert 60 == printed
        assert "The first 60 of 609 rows" in row_count

    def test_page_without_scripts_shows_verdict_and_uncompared_tensors(self, browser, tmp_path):
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        browser.get(write(tmp_path, report_of(make_mixed())).as_uri())
        text = browser.find_element("tag name", "body").text
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})

        assert text.index("Inconclusive") < text.index("SNR")
        assert "Not compared: 2 tensors" in text
        assert "needs JavaScript" in text
        assert "Colour by" not in text


class TestHostileNames:
    def test_hostile_names_run_no_script_and_make_no_element(self, evil):
        for place in range(3):
            evil.run("document.querySelectorAll('#rows button')[arguments[0]].click()", place)
            evil.click("#close")
        evil.click("#columns [data-key=name] button")
        made = evil.run("return [...new Set([...document.body.querySelectorAll('*')].map(e => e.localName))].sort()")

        assert evil.browser.title.endswith(": 32.13 dB, inconclusive – quanterr")
        assert not {"img", "iframe", "object", "link", "failure"} & set(made)
        assert 0 == evil.run("return document.querySelectorAll('svg:not(.curves svg)').length")
        assert 2 == evil.run("return document.scripts.length")

    def test_hostile_names_are_shown_with_everything_unprintable_escaped(self, evil):
        shown = "\n".join(evil.column(0))

        assert r"line\x0abreak\x0d::error::title" in shown
        assert "</script><script>document.title='pwned'</script>" in shown
        assert all(c.isprintable() or c == "\n" for c in shown)


@pytest.fixture(scope="module")
def candidates(browser, tmp_path_factory):
    """A ranking of an original with three blocks and two candidates, one of them with a bad layer."""
    folder = tmp_path_factory.mktemp("ranking")
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)]
    x = {name: numbers(64, 128, seed=n) for n, name in enumerate(names)}
    paths = []
    for recipe in (quantized_fp8, quantized_int8):
        tensors = dict(x)
        for name in names[recipe is quantized_int8 :]:  # INT8 leaves the first layer unquantized
            tensors[name], tensors[f"{name}_scale"] = recipe(x[name])
        paths.append(store(folder / f"{recipe.__name__}.safetensors", tensors))
    original = store(folder / "x.safetensors", x)
    ranking = quanterr.rank(original, paths, device="cpu", keep_original="9000")
    ranking.save(folder / "ranking.html")
    old, new = (quanterr.compare(original, path, device="cpu") for path in paths)
    quanterr.diff(old, new).save(folder / "diff.html")
    return folder


class TestRankingPage:
    @pytest.fixture
    def page(self, browser, candidates):
        with open_page(browser, candidates / "ranking.html") as page:
            yield page

    def test_ranking_page_has_candidate_columns_and_the_largest_spread_first(self, page):
        heads = page.run("return [...document.querySelectorAll('#columns th')].map((th) => th.textContent.trim())")

        assert ["Layer", "Role", "Best", "Spread %", "quantized_int8", "quantized_fp8"] == [
            h.rstrip(" ↑↓") for h in heads
        ]
        assert {"quantized_int8"} == set(page.column(2))
        assert "identical" in page.column(4)

    def test_candidate_in_the_plot_colours_the_map_by_key(self, page):
        from selenium.webdriver.common.keys import Keys

        points = "return [...document.querySelectorAll('#front-plot .point')].map((e) => e.getAttribute('aria-label'))"
        assert ["quantized_int8", "quantized_fp8"] == [point.split(":")[0] for point in page.run(points)]
        page.run("document.querySelectorAll('#front-plot .point')[1].focus()")
        page.press(Keys.ENTER)

        assert "snr_1" == page.run("return document.getElementById('place-metric').value")

    def test_layer_details_show_how_each_candidate_stores_it(self, page):
        page.run("[...document.querySelectorAll('#mix a.layer')].at(-1).click()")
        details = page.text("#details-body")

        for text in ("quantized_int8", "quantized_fp8", "int8_tensor", "fp8_tensor", "Σe²"):
            assert text in details

    def test_ranking_page_without_ranked_candidates_explains_why(self, browser, candidates, tmp_path):
        lacking = store(tmp_path / "lacking.safetensors", {"model.layers.0.mlp.up_proj.weight": numbers(64, 128)})
        quanterr.rank(candidates / "x.safetensors", [lacking, candidates / "x.safetensors"]).save(tmp_path / "r.html")
        with open_page(browser, tmp_path / "r.html", ready="#columns th") as page:
            assert "0 tensors" in page.text("#count")
            assert "lacking: inconclusive" in page.text(".reasons")

    def test_best_candidate_filters_the_table(self, page):
        page.choose("#best", "quantized_int8")

        assert page.text("#count").startswith("3 tensors")


class TestDiffPage:
    @pytest.fixture
    def page(self, browser, candidates):
        with open_page(browser, candidates / "diff.html") as page:
            yield page

    def test_diff_page_has_maps_for_the_change_and_both_sides(self, page):
        choices = page.run("return [...document.getElementById('place-metric').options].map((o) => o.textContent)")

        assert ["Change", "Old SNR", "New SNR"] == choices
        assert 3 == page.run("return document.querySelectorAll('#places td.cell').length")

    def test_layer_that_became_identical_raises_no_alarm(self, page):
        cells = page.run("return [...document.querySelectorAll('#places td.cell')].map((cell) => cell.textContent)")

        assert not [text for text in cells if "!" in text]

    def test_layer_details_show_both_levels(self, page):
        page.click("#worse a.layer, #better a.layer")

        assert "Old SNR" in page.text("#details-body")
        assert "New SNR" in page.text("#details-body")


class TestOtherPages:
    def test_links_lead_to_visible_sections(self, browser, tmp_path):
        inspection().save(tmp_path / "flat.html")  # a single block has no map
        page = Page(browser, tmp_path / "flat.html")

        assert [True] == list(
            set(
                page.run(
                    "return [...document.querySelectorAll('nav a')].map((e) => !document.querySelector(e.hash).hidden)"
                )
            )
        )
        assert page.run("return document.getElementById('places').hidden")

    def test_plan_page_draws_its_curve(self, browser, tmp_path):
        plan().save(tmp_path / "plan.html")

        assert 1 == Page(browser, tmp_path / "plan.html").run("return document.querySelectorAll('#curve path').length")


class TestEvaluationPage:
    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, tmp_path_factory):
        """An evaluation page for a small model with two candidates."""
        pytest.importorskip("transformers", reason="transformers is not installed")
        from support.small_models import ids, load_tensors, quantized_by, save_model

        folder = tmp_path_factory.mktemp("evaluation")
        original, paths = save_model("llama", folder / "original"), []
        for recipe in (quantized_fp8, quantized_int8):
            paths.append(folder / recipe.__name__)
            paths[-1].mkdir()
            store(paths[-1] / "model.safetensors", quantized_by(recipe, load_tensors(original))[0])
        quanterr.evaluate(original, paths, tokens=ids(folder), context=32).save(folder / "evaluation.html")
        return folder / "evaluation.html"

    @pytest.fixture
    def page(self, browser, path):
        with open_page(browser, path) as page:
            yield page

    def test_evaluation_page_has_a_map_and_an_error_column_per_candidate(self, page):
        heads = page.run("return [...document.querySelectorAll('#columns th')].map((th) => th.textContent.trim())")

        assert ["quantized_fp8 %", "quantized_int8 %"] == [head.rstrip(" ↑↓") for head in heads[3:]]
        assert 14 == page.run("return document.querySelectorAll('#places td.cell').length")
        assert "%" in page.text("#place-legend")

    def test_weight_details_show_both_candidates(self, page):
        page.click("#rows button")

        assert "Output error, quantized_int8" in page.text("#details-body")
        assert "Share of block, quantized_fp8" in page.text("#details-body")


@pytest.mark.slow
class TestManyLayers:
    def time(self, page, script):
        return page.run(f"const t = performance.now(); {script}; return performance.now() - t")

    def test_large_page_stays_quick(self, many):
        sorting = self.time(many, "document.querySelector('[data-key=max_absolute_error] button').click()")
        naming = self.time(many, "document.querySelector('[data-key=name] button').click()")
        typing = "const e = document.getElementById('search'); e.value = 'experts.17.'; "
        filtering = self.time(many, typing + "e.dispatchEvent(new Event('input'))")
        count = many.text("#count")
        many.click("#reset")
        print(f"\nopen {many.seconds:.1f} s, sort {sorting:.0f} ms, by name {naming:.0f} ms, filter {filtering:.0f} ms")

        assert count.startswith("39 of 10,145 tensors")

    def test_last_row_of_a_large_page_can_be_reached(self, many):
        many.run("document.getElementById('viewport').scrollTop = 1e9")
        many.wait("return document.querySelector('#rows tr[aria-rowindex=\"10146\"]')")

    def test_cell_with_many_experts_filters_the_table(self, many):
        many.click('.map td[aria-label^="model.layers.10 mlp.experts.*.up_proj"]')

        assert many.text("#count").startswith("256 of 10,145 tensors")
        assert many.text("#picked").startswith("model.layers.10 mlp.experts.*.up_proj")

    def test_layer_without_details_refers_to_other_outputs(self, many):
        many.click("#reset")
        many.choose("#status", "0")
        for key in ("name", "snr_db", "snr_db"):  # the best first
            many.click(f"#columns [data-key={key}] button")
        many.click("#rows button")
        details = many.text("#details-body")
        many.click("#close")

        assert "The other metrics of this layer are in the JSON and CSV reports." in details
        assert "mean absolute error" in details
