"""The bench harness: what it counts, what it refuses to time, what it writes. Times themselves need a GPU."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import torch_witcert
from torch_witcert.bench.__main__ import build_parser, main
from torch_witcert.bench.attention import FORMATS, measure_shape, with_ratio
from torch_witcert.bench.competitors import RIVALS, certified_reads, folded
from torch_witcert.bench.gate import check_input, judge, plan
from torch_witcert.bench.inputs import bytes_moved, filled_cache, random_tokens, read_arguments, rotations
from torch_witcert.bench.report import COLUMNS, CsvFile, Row, write_plot
from torch_witcert.bench.scaling import Line, sizes
from torch_witcert.bench.session import Refused, Session
from torch_witcert.bench.shapes import SHAPES, Shape
from torch_witcert.bench.timer import Call, Measured, Percentiles, attempt
from torch_witcert.evaluation import toy
from torch_witcert.evaluation.memory import token_bytes
from torch_witcert.evaluation.output import commit
from torch_witcert.ops.formats import DEFAULT
from torch_witcert.ops.splits import pages_per_split
from torch_witcert.testing.harness import REFERENCE, Operators, Soundness

PAGE = 16
TOY = Shape("toy", 6, 2, 64, 2, 100)
TIMES = Percentiles(9.0, 10.0, 12.0)


def fake_measure(calls: Mapping[str, Sequence[Call]], rounds: int) -> Measured:
    """Every call runs once; the first competitor takes 10 us, and each one 1 us more than the one before."""
    times, refused = {}, {}
    for index, (name, each) in enumerate(calls.items()):
        reasons = [reason for _, reason in (attempt(call) for call in each) if reason]
        if reasons:
            refused[name] = reasons[0]
        else:
            times[name] = Percentiles(*(x + index for x in TIMES))
    return Measured(times, refused)


def toy_session(operators: Operators = REFERENCE, **options) -> Session:
    return Session(PAGE, 1, device="cpu", operators=operators, measure=fake_measure, probe_bytes=2**12, **options)


def wrong_attention(*arguments):
    """Its outputs are off by a half: no bound holds."""
    out, lse, certificate = REFERENCE.certified_attention(*arguments)
    return out + 0.5, lse, certificate


def failing_attention(*arguments):
    raise RuntimeError("out of registers")


def toy_command(operators: Operators, *arguments: str) -> tuple[int, list[str]]:
    """Exit status of a small run on the CPU, without the rival that compiles."""
    small = ["--shapes", "S4", "--batch-size", "1", "--cached-tokens", "40", "--rivals", "flash", "cudnn"]
    return main(["attention", *small, *arguments], lambda options: toy_session(operators))


def read_csv(path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_shapes_are_those_that_are_published():
    table = {
        name: (shape.heads, shape.kv_heads, shape.head_dim, shape.batch, shape.tokens) for name, shape in SHAPES.items()
    }
    assert table == {
        "S1": (32, 8, 128, 1, 131072),
        "S2": (32, 8, 128, 16, 8192),
        "S3": (28, 4, 128, 8, 32768),
        "S4": (9, 3, 64, 32, 8192),
        "S5": (32, 8, 128, 64, 2048),
    }
    assert SHAPES["S3"].group == 7
    assert SHAPES["S1"].dense_bytes == 2 * 8 * 128 * 131072 * 2


def test_percentiles_of_known_samples():
    assert Percentiles.of([float(x) for x in range(101)]) == pytest.approx((20, 50, 80))
    assert Percentiles.of([3.0]) == (3, 3, 3)
    assert Percentiles.of([2.0, 1.0]) == pytest.approx((1.2, 1.5, 1.8))


def test_rotating_inputs_hold_more_than_twice_the_cache():
    megabyte = 2**20
    for nbytes in (1, megabyte, 50 * megabyte, 60 * megabyte, 119 * megabyte, 120 * megabyte):
        count = rotations(nbytes, 60 * megabyte)
        assert count * nbytes > 120 * megabyte
        assert (count - 1) * nbytes <= 120 * megabyte
    assert rotations(500 * megabyte, 60 * megabyte) == 2


def test_inputs_that_do_not_fit_are_refused():
    session = toy_session(memory=10**9)
    assert session.inputs_of([TOY], FORMATS) == [2]
    with pytest.raises(Refused, match="S1: 32/8 .* more than --memory-gb 1: choose fewer --formats"):
        session.inputs_of([SHAPES["S1"]], FORMATS)


@pytest.mark.parametrize("store_format", FORMATS, ids=lambda each: each.name)
def test_bytes_moved_grow_by_what_a_page_takes(store_format):
    """And an unfinished page by its exact tokens."""
    whole = replace(TOY, tokens=6 * PAGE)
    grown = bytes_moved(replace(TOY, tokens=9 * PAGE), store_format, PAGE) - bytes_moved(whole, store_format, PAGE)
    account = sum(token_bytes(store_format, PAGE, TOY.head_dim, torch.bfloat16))
    assert grown == TOY.batch * 3 * PAGE * TOY.kv_heads * account
    unfinished = bytes_moved(replace(TOY, tokens=6 * PAGE + 5), store_format, PAGE)
    assert unfinished - bytes_moved(whole, store_format, PAGE) == TOY.batch * 5 * TOY.token_bytes


def test_bytes_moved_agree_with_the_caches_own_account():
    model, _ = toy.load(dtype=torch.bfloat16)
    torch_witcert.convert(model, torch_witcert.CertifiedInt8Config(page_size=PAGE))
    layers, table = 2, 4 / PAGE
    account = (torch_witcert.CertifiedCache(model, 64).bytes_per_token() - table) / layers
    shape = Shape("model", 4, 2, 64, 1, 4 * PAGE)
    grown = bytes_moved(replace(shape, tokens=5 * PAGE), DEFAULT, PAGE) - bytes_moved(shape, DEFAULT, PAGE)
    assert grown == PAGE * account


def test_gate_has_the_geometry_of_the_shape_and_reads_several_splits():
    for shape in SHAPES.values():
        for store_format in FORMATS:
            scenarios = plan(shape, store_format, 64)
            for scenario in scenarios:
                assert (scenario.num_kv_heads, scenario.group) == (shape.kv_heads, shape.group)
                assert (scenario.head_dim, scenario.page_size) == (shape.head_dim, 64)
                assert (scenario.dtype, scenario.store_format) == (torch.bfloat16, store_format.name)
            decode = scenarios[0]
            assert set(decode.chunks) == {1}
            assert decode.prefill // 64 > 2 * pages_per_split(64, decode.pages_per_row)
            assert any(scenario.is_probabilistic for scenario in scenarios) == store_format.key.is_dithered


def test_gate_is_red_for_any_violation_and_for_bounds_that_say_nothing():
    sound = Soundness(reads=8, unbounded=2)
    assert judge(sound).green
    for field in ("tv_violations", "output_violations", "arithmetic_violations", "probabilistic_violations"):
        verdict = judge(replace(sound, **{field: 1}))
        assert not verdict.green and "1 violations in 8 reads" in verdict.reason
    assert judge(replace(sound, unbounded=8)) == (False, "none of 8 reads has a finite bound")
    assert not judge(Soundness()).green


@pytest.mark.parametrize("tokens", [5, 2 * PAGE, 3 * PAGE - 1, 40])
def test_timed_input_holds_the_tokens_and_is_checked(tokens):
    """The check writes a token and leaves what the timed reads return."""
    shape = replace(TOY, tokens=tokens)
    made = random_tokens(shape, 0, "cpu")
    cache = filled_cache(shape, made, DEFAULT, PAGE, REFERENCE)
    assert cache.lengths.tolist() == [tokens] * shape.batch
    assert torch.equal(cache.keys[:, :, :tokens], made.k) and torch.equal(cache.values[:, :, :tokens], made.v)
    arguments = read_arguments(cache, made)
    before = REFERENCE.certified_attention(*arguments)
    assert check_input(cache, made, arguments, REFERENCE).green
    for first, second in zip(before, REFERENCE.certified_attention(*arguments), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("store_format", FORMATS, ids=lambda each: each.name)
def test_every_format_passes_its_gate(store_format):
    reads = certified_reads(replace(TOY, batch=1), store_format, PAGE, 2, REFERENCE, "cpu")
    assert reads.verdict.green, reads.verdict.reason
    assert len(reads.calls) == 2


def test_timed_input_that_is_wrong_is_red():
    made = random_tokens(TOY, 0, "cpu")
    cache = filled_cache(TOY, made, DEFAULT, PAGE, REFERENCE)
    wrong = Operators(REFERENCE.kv_write, wrong_attention)
    assert not check_input(cache, made, read_arguments(cache, made), wrong).green


def test_wrong_only_at_the_timed_size_is_red_too():
    """Scenarios are smaller than what is timed; here they pass."""
    shape = replace(TOY, batch=3)

    def attention(*arguments):
        is_timed = arguments[0].shape[0] == shape.batch
        return (wrong_attention if is_timed else REFERENCE.certified_attention)(*arguments)

    reads = certified_reads(shape, DEFAULT, PAGE, 2, Operators(REFERENCE.kv_write, attention), "cpu")
    assert not reads.verdict.green and reads.calls == []


def test_command_writes_every_competitor(tmp_path, capsys):
    path, plot = tmp_path / "folder" / "rows.csv", tmp_path / "ratios.png"
    assert toy_command(REFERENCE, "--csv", str(path), "--plot", str(plot)) == 0
    rows = read_csv(path)
    assert tuple(rows[0]) == COLUMNS
    assert [(row["competitor"].split(",")[0], row["format"], row["gate"]) for row in rows] == [
        ("certified", DEFAULT.name, "green"),
        ("memory floor", DEFAULT.name, "-"),
        ("memory floor", "bf16", "-"),
        ("SDPA flash", "bf16", "-"),
        ("SDPA cuDNN", "bf16", "-"),
    ]
    certified, flash, cudnn = rows[0], rows[3], rows[4]
    assert (certified["p20_us"], certified["p50_us"], certified["p80_us"]) == ("9.00", "10.00", "12.00")
    assert certified["bytes_moved"] == str(bytes_moved(replace(SHAPES["S4"], batch=1, tokens=40), DEFAULT, PAGE))
    assert certified["torch"] == torch.__version__ and certified["torch_witcert"] == torch_witcert.__version__
    assert flash["ratio"] == "1.0000"
    assert float(certified["ratio"]) == pytest.approx(10 / float(flash["p50_us"]), abs=1e-4)
    assert cudnn["p50_us"] == cudnn["ratio"] == "" and "folded not available: " in cudnn["note"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr()
    assert "gate green" in said.err
    assert "SDPA cuDNN: SDPA cuDNN, grouped heads not available: " in said.out


@pytest.mark.parametrize(
    ("attention", "reason"), [(wrong_attention, "violations"), (failing_attention, "RuntimeError: out of registers")]
)
def test_red_gate_has_no_time_and_the_command_fails(attention, reason, tmp_path, capsys):
    path, plot = tmp_path / "rows.csv", tmp_path / "ratios.png"
    broken = Operators(REFERENCE.kv_write, attention)
    assert toy_command(broken, "--csv", str(path), "--plot", str(plot)) == 1
    certified, *others = read_csv(path)
    assert certified["gate"] == "red" and reason in certified["note"]
    assert {certified[name] for name in ("p20_us", "p50_us", "p80_us", "GB/s", "ratio")} == {""}
    assert any(row["competitor"].startswith("SDPA flash") and row["ratio"] for row in others)
    said = capsys.readouterr()
    assert "gate RED, not timed" in said.err
    assert f"RED GATE, not timed: {DEFAULT.name} on S4" in said.out


def test_reads_that_cannot_be_captured_are_red():
    def refusing(calls, rounds):
        return Measured({}, {name: "cannot be captured" for name in calls})

    rows = measure_shape(TOY, [DEFAULT], ["flash"], 2, replace(toy_session(), measure=refusing))
    assert [row.times for row in rows] == [None] * 4
    assert rows[0].gate == "red" and rows[0].note == "cannot be captured"
    assert rows[3].note.count("not available: cannot be captured") == 2


def test_folded_queries_are_the_same_attention():
    made = random_tokens(TOY, 0, "cpu")
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = attend(made.q.double(), made.k.double(), made.v.double(), enable_gqa=True)
    rows = attend(folded(made).double(), made.k.double(), made.v.double())
    torch.testing.assert_close(rows.flatten(1, 2), grouped.squeeze(2))


def test_ratio_is_to_the_rival():
    row = Row(TOY, PAGE, 1, "certified", DEFAULT.name, 10**6, TIMES)
    assert with_ratio(row, 20.0).ratio == 0.5
    assert with_ratio(row, None).ratio is None
    assert with_ratio(replace(row, times=None), 20.0).ratio is None
    assert row.cells()["GB/s"] == "100"


def test_reason_of_a_failure_names_warnings_once():
    def fail():
        for _ in range(2):
            torch.warnings.warn("only on Hopper\nand later", stacklevel=1)
        raise RuntimeError("No available kernel.\ndetails")

    assert attempt(fail) == (None, "RuntimeError: No available kernel.; only on Hopper")
    assert attempt(lambda: 3) == (3, "")


def test_files_are_never_overwritten(tmp_path, capsys):
    row = Row(TOY, PAGE, 1, "certified", DEFAULT.name, 10**6, TIMES, gate="green", ratio=0.5)
    path = tmp_path / "rows.csv"
    file = CsvFile(str(path))
    file.append([row])
    file.append([row, row])
    assert len(read_csv(path)) == 3
    with pytest.raises(FileExistsError):
        CsvFile(str(path)).append([row])
    CsvFile(None).append([row])
    for name in ("--csv", "--plot"):
        with pytest.raises(SystemExit) as stop:
            main(["attention", name, str(path)], lambda options: toy_session())
        assert stop.value.code == 2
        assert f"{name} must name a new file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="must have a ratio to draw"):
        write_plot(tmp_path / "none.png", [replace(row, ratio=None)])


def test_commit_names_the_state_of_the_checkout(tmp_path):
    file = tmp_path / "code.py"
    file.write_text("x = 1\n")
    assert commit(file) == "unknown"

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    assert commit(file) == "unknown", "not tracked"
    git("add", "code.py")
    git("commit", "-q", "-m", "code")
    assert commit(file) == git("rev-parse", "HEAD").strip()
    file.write_text("x = 2\n")
    assert commit(file) == git("rev-parse", "HEAD").strip() + "-dirty"


def test_line_through_points_and_its_residuals():
    line = Line.through([1, 2, 3, 4], [12.0, 14.0, 16.0, 18.0])
    assert (line.start, line.slope) == pytest.approx((10, 2))
    assert line.residuals == pytest.approx([0] * 4, abs=1e-12)
    assert max(Line.through([1, 2, 3], [1.0, 2.0, 6.0]).residuals) > 0.1


def test_sizes_are_fifths():
    assert sizes(8192) == [1638, 3276, 4915, 6553, 8192]
    assert sizes(16) == [3, 6, 9, 12, 16]
    assert sizes(1) == [1, 2, 3, 4, 5]


def test_scaling_command_prints_a_line_of_each_axis(tmp_path, capsys):
    path = tmp_path / "points.csv"
    small = ["--shape", "S4", "--batch-size", "1", "--cached-tokens", "40", "--csv", str(path)]
    assert main(["scaling", *small], lambda options: toy_session()) == 0
    rows = read_csv(path)
    assert [row["cached_tokens"] for row in rows] == ["8", "16", "24", "32", "40"] + ["40"] * 5
    assert [row["batch"] for row in rows] == ["1"] * 5 + ["1", "2", "3", "4", "5"]
    said = capsys.readouterr().out
    assert "us a cached token; largest cliff" in said
    assert "p50 = 9.00 us + 1 us a row; largest cliff +0.0%" in said


@pytest.mark.parametrize(("command", "argument"), [("attention", "--rivals"), ("scaling", "--cached-tokens")])
def test_commands_have_help(command, argument, capsys):
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([command, "--help"])
    assert stop.value.code == 0
    assert argument in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--shapes", "S9"], "invalid choice: 'S9'"),
        (["attention", "--formats", "int9"], "must be the name of a StoreFormat"),
        (["attention", "--formats", "fp8/token/0/none+int8/none"], "'fp8' is supported with key scaling 'symmetric'"),
        (["attention", "--rounds", "0"], "must be a whole number of at least 1, got '0'"),
        (["scaling", "--cached-tokens", "4"], "must be a whole number of at least 5, got '4'"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["attention", "scaling"])
def test_without_a_gpu_the_commands_say_so(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command])
    assert stop.value.code == 2
    assert "timed on a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_whole_command_on_a_gpu(tmp_path):
    """Toy sizes that are no multiple of a page: all formats and rivals, captured and timed."""
    path, plot = tmp_path / "rows.csv", tmp_path / "ratios.png"
    small = ["--shapes", "S4", "--batch-size", "2", "--cached-tokens", "5000", "--rounds", "3", "--formats", "all"]
    assert main(["attention", *small, "--csv", str(path), "--plot", str(plot)]) == 0
    rows = read_csv(path)
    certified = [row for row in rows if row["competitor"] == "certified"]
    assert [row["gate"] for row in certified] == ["green"] * len(FORMATS)
    assert all(float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"]) for row in certified)
    competing = [row for row in rows if row["format"] == "bf16" and row["competitor"] != "memory floor"]
    assert len(competing) == len(RIVALS)
    assert min(float(row["ratio"]) for row in competing if row["ratio"]) == 1
    assert all(row["p50_us"] or "not available: " in row["note"] for row in competing)
    assert plot.stat().st_size > 0
