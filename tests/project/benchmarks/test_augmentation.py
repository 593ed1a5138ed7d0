"""The benchmark of augmentation: all contenders make the same kind of batch, and tables show each result."""

# ruff: noqa: E402  (without torchvision, the imports below end the interpreter)

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.generated_images import smooth_image
from PIL import Image

lacking.require("torchvision")

from benchmarks.augmentation import __main__ as command
from benchmarks.augmentation import boxes, tables
from benchmarks.augmentation import own as user_transforms
from benchmarks.augmentation.cases import dense, headline, recipes, transforms
from benchmarks.augmentation.contenders import BACKENDS, PEERS, Contender, contenders, least_bytes
from benchmarks.augmentation.kernel import kernels_alone, launcher
from benchmarks.augmentation.measuring import CaseResult, CudaClock, Reading, Row, copy_bandwidth, cpu_clock, measure
from benchmarks.augmentation.photographs import Photographs
from benchmarks.peers.protocol import MEAN, STD
from benchmarks.running import REPOSITORY
from gpuload import transforms as T

CASES = [*transforms(), *recipes(), *dense(), *headline()]
COUNT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two photographs, a landscape and a portrait."""
    root = tmp_path_factory.mktemp("photographs")
    for number, (height, width) in enumerate([(375, 500), (400, 300)]):
        Image.fromarray(smooth_image(height, width, number)).save(root / f"{number}.jpg")
    return root


@pytest.fixture(scope="module")
def photographs(folder):
    return Photographs(folder, COUNT, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contenders_of_a_case_make_the_same_kind_of_batch(case, photographs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn of future changes
        by_name = contenders(case, photographs, ["torch"], list(PEERS))
        batches = {name: contender.run(1) for name, contender in by_name.items() if isinstance(contender, Contender)}
    own_batch = batches.pop("gl.Augment torch" if case.section == "dense" else "gpuload torch")
    assert own_batch.dtype == (getattr(torch, case.dtype) if case.floats else torch.uint8)
    assert own_batch.is_contiguous(memory_format=torch.channels_last if case.channels_last else torch.contiguous_format)
    assert PEERS["batch"] in batches or case.boxes
    for name, batch in batches.items():
        assert batch.shape == own_batch.shape, name
        # Kornia's results are floats where ours are uint8.
        assert batch.dtype == (own_batch.dtype if case.floats or "Kornia" not in name else torch.float32), name
        assert batch.stride() == own_batch.stride(), name


def test_contenders_agree_where_nothing_is_random(photographs):
    case = next(case for case in recipes() if case.name == "evaluation")
    by_name = contenders(case, photographs, ["torch"], ["pillow", "tensors", "batch"])
    own_batch, *peer_batches = (contender.run(0) for contender in by_name.values() if isinstance(contender, Contender))
    assert len(peer_batches) == 3
    for peer_batch in peer_batches:
        assert (own_batch - peer_batch).abs().max() < 2.01 / 255 / 0.224  # two levels


@pytest.mark.parametrize("case", dense(), ids=lambda case: case.name)
def test_augment_of_a_dense_batch_equals_the_stage(case, photographs):
    """The module draws for each image, like the stage."""
    [augment] = contenders(case, photographs, ["torch"], []).values()
    [stage] = contenders(replace(case, section="recipes"), photographs, ["torch"], []).values()
    assert isinstance(augment, Contender)
    assert isinstance(stage, Contender)
    for turn in (2, 1, 2):
        assert torch.equal(augment.run(turn), stage.run(turn))
    assert torch.equal(augment.run(1), augment.run(2)) == (case.name == "dense, evaluation")


def test_contenders_that_cannot_run_have_a_reason(photographs):
    case = next(case for case in recipes() if case.boxes)
    by_name = contenders(case, photographs, ["fused"], list(PEERS))
    reasons = {name: contender for name, contender in by_name.items() if isinstance(contender, str)}
    assert reasons == {
        "gpuload fused": "Triton runs on the CPU in its interpreter only, whose speed means nothing",
        PEERS["batch"]: "the crops depend on the boxes of each image",
        PEERS["kornia"]: "Kornia has no crop that depends on boxes",
    }


def test_backend_that_falls_back_to_torch_is_not_a_contender(photographs):
    cases = {case.name: case for case in CASES}
    by_name = {name: contenders(cases[name], photographs, ["kornia"], []) for name in ("timm", "RandomEqualize")}
    assert by_name["timm"] == {"gpuload kornia": "torch runs RandomErasing, RandomChoice"}
    assert isinstance(by_name["RandomEqualize"]["gpuload kornia"], Contender)
    by_name = contenders(dense()[0], photographs, ["kornia", "fused"], [])
    assert isinstance(by_name["gl.Augment kornia"], Contender)
    assert by_name["gl.Augment fused"] == "Triton runs on the CPU in its interpreter only, whose speed means nothing"


def test_dali_by_hand_equals_the_stage(photographs):
    """Pixels are equal without random parameters; with random parameters, each image has its own."""
    lacking.require("nvidia.dali")
    cases = {case.name: case for case in dense()}
    stage, by_hand = contenders(cases["dense, evaluation"], photographs, ["torch"], ["dali"]).values()
    assert (stage.run(0) - by_hand.run(0)).abs().mean() < 1 / 255 / 0.225  # one level
    crops = contenders(cases["dense, classic"], photographs, [], ["dali"])[PEERS["dali"]].run(0)
    assert not torch.equal(crops[0], crops[2])  # both are crops of the first photograph
    assert contenders(cases["dense, classic + RandAugment"], photographs, [], ["dali"]) == {
        PEERS["dali"]: "DALI has policies only for its pipelines"
    }
    assert contenders(recipes()[0], photographs, [], ["dali"]) == {}


def test_least_bytes_counts_what_a_case_must_read_and_write(photographs):
    cases = {case.name: case for case in CASES}
    crop = COUNT * 3 * 224 * 224
    assert least_bytes(cases["RandomHorizontalFlip"], photographs, [1, 2]) == 2 * crop
    assert least_bytes(cases["Normalize"], photographs, [1]) == 5 * crop  # floats are written
    assert least_bytes(cases["CenterCrop"], photographs, [1]) == 2 * crop  # nothing around the crop is read
    assert least_bytes(cases["500×375 → 224, float16, NCHW"], photographs, [1]) < COUNT * 3 * 375 * 500 + 2 * crop


def test_photographs_are_repeated_and_resized(photographs):
    assert [image.size for image in photographs.pillow("photographs")] == [(500, 375), (300, 400)] * 2
    assert photographs.dense("photographs").shape == (COUNT, 3, 375, 500)
    assert photographs.dense("squares").shape == (COUNT, 3, 256, 256)
    assert photographs.file_count == 2
    assert torch.equal(photographs.dense("crops"), torch.stack(photographs.tensors("crops")))
    images = photographs.ragged("crops")
    first_image = images.pixels[: 224 * 224 * 3].view(224, 224, 3).permute(2, 0, 1)
    assert torch.equal(first_image, photographs.tensors("crops")[0])


class Ticks:
    """A clock by which each turn takes the time that its contender returns."""

    def __call__(self, run, turn):
        return Reading(run(turn), 0.0)


def test_measure_skips_the_first_round_and_reports_failures(capsys):
    calls = []

    def broken(turn):
        raise RuntimeError("no such operator\nand more")

    rows = measure(
        {
            "steady": Contender(lambda turn: calls.append(turn) or 2.0, ("Resize",)),
            "growing": Contender(lambda turn: 3.0 * turn),
            "broken": Contender(broken),
            "absent": "not installed",
        },
        Ticks(),
        3,
    )
    assert calls == [0, 1, 2, 3]
    assert [reading.ms for reading in rows["growing"].readings] == [3, 6, 9]
    assert tables.ratio(rows["growing"], rows["steady"]) == (3, 1.5, 4.5)
    assert rows["steady"].falls_back == ("Resize",)
    assert (rows["broken"].failed, rows["broken"].readings) == ("RuntimeError: no such operator", [])
    assert rows["absent"].missing == "not installed"
    assert "no such operator" in capsys.readouterr().err


def test_measure_starts_no_round_after_the_deadline():
    rows = measure({"one": Contender(lambda turn: 1.0)}, Ticks(), 3, deadline=time.monotonic() - 1)
    assert rows["one"] == Row(missing="the time was up")


def result(name="classic", section="recipes", **rows):
    names = {"torch": "gpuload torch", "fused": "gpuload fused", "kornia": PEERS["kornia"], "alone": tables.KERNELS}
    names |= {"augment": "gl.Augment torch", "batch": PEERS["batch"], "by_hand": PEERS["dali"]}
    names |= {f"augment_{backend}": f"gl.Augment {backend}" for backend in ("kornia", "dali")}
    return CaseResult(name, section, 1000, roofline_ms=0.5, rows={names[key]: row for key, row in rows.items()})


def test_launcher_of_kernels_equals_the_stage(photographs):
    from gpuload.stage.fused.pixels import INTERPRETED

    if not INTERPRETED.value:
        lacking.skip("Triton's interpreter")
    steps = (T.RandomCrop(16), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD))
    case = replace(headline()[1], ours=steps, start="crops")
    expected = contenders(case, photographs, ["torch"], [])["gpuload torch"].run(3)
    batch = launcher(case, photographs)(3)
    assert batch.stride() == expected.stride()
    assert (batch - expected).abs().max() < 1.01 / 255 / min(STD)  # a level
    on_cpu = kernels_alone(case, photographs)
    assert [type(reason) for reason in on_cpu.values()] == [str, str]  # reasons why it cannot run


def row(*ms, **fields):
    return Row([Reading(time, time) for time in ms], **fields)


def test_tables_show_measured_missing_and_failed_rows():
    case_result = result(torch=row(1.0, 2.0), kornia=row(3.0, 4.0), fused=Row(missing="no CUDA"))
    ms, rates, times = (text.splitlines()[-1] for text in tables.tables([case_result], 10, "CPU"))
    assert ms.split() == ["classic", "1.5", "3.5", "–", "0.5"]
    assert rates.split() == ["classic", "6,667", "2,857", "–", "0.5"]
    assert " ".join(times.split()) == "classic 1.00 (1.00 … 1.00) 2.50 (2.00 … 3.00) – 0.5"
    single = result("Resize", "transforms", torch=row(1.5), fused=row(0.0001, falls_back=("Resize",)))
    assert "0.0001*" in tables.tables([single], 10, "CPU")[0]
    failing = result("Pad", "transforms", torch=Row(failed="ValueError: no"), fused=Row(missing="no CUDA"))
    assert tables.notes([single, failing]) == [
        "* gpuload fused: torch in its place: Resize",
        "– not measured: gpuload fused: Pad: no CUDA",
        "failed: gpuload torch: Pad: ValueError: no",
    ]
    for text in tables.tables([failing], 10, "CPU"):
        assert "failed" in text


@pytest.mark.parametrize(("ms", "met"), [(16.0, True), (16.1, False)])
def test_judge_on_the_cpu_allows_a_quarter_of_a_millisecond_per_image(ms, met):
    assert [verdict.met for verdict in tables.judge("cpu", [result(torch=row(ms))], 64)] == [met, None]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"kornia": row(6.0, 6.0), "batch": row(2.0, 2.0)}, [True, True, None, None]),
        ({"kornia": row(5.9, 5.9), "batch": row(1.9, 1.9)}, [False, False, None, None]),
        ({"kornia": Row(missing="not installed"), "batch": row(2.0, 4.0)}, [None, True, None, None]),
        ({"kornia": row(7.0, 6.0), "augment_kornia": row(5.8, 5.0)}, [True, None, True, None]),
        ({"kornia": row(7.0, 6.0), "augment_kornia": row(5.9, 5.1)}, [True, None, False, None]),
        ({"by_hand": row(9.1, 8.0), "augment_dali": row(10.0, 8.8)}, [None, None, None, True]),
        ({"by_hand": row(8.9, 8.0), "augment_dali": row(10.0, 9.0)}, [None, None, None, False]),
        ({"by_hand": row(9.0), "augment_dali": Row(missing="torch runs Resize")}, [None, None, None, None]),
    ],
)
def test_judge_of_dense_batches_requires_minimum_ratios_to_the_peers(rows, expected):
    case_result = result("dense, classic", "dense", augment=row(2.0, 2.0), **rows)
    assert tables.base_of(case_result.rows) == "gl.Augment torch"
    verdicts = [verdict for verdict in tables.judge("cpu", [case_result], 64) if "dense" in verdict.text]
    assert [verdict.met for verdict in verdicts] == expected
    assert "at least 3 times as long as gl.Augment torch: " in verdicts[0].text


def test_judge_does_not_compare_policies_of_different_libraries():
    policies = [case.name for case in dense() if case.name.endswith("Augment")]
    assert len(policies) == 2
    judged = tables.judge("cpu", [result(name, "dense", augment=row(1.0), kornia=row(1.0)) for name in policies], 64)
    assert {verdict.met for verdict in judged} == {None}
    assert [verdict.text for verdict in judged if "dense" in verdict.text] == []


@pytest.mark.parametrize(
    ("alone_ms", "kornia_ms", "expected"),
    [(0.25, 2.6, [True, True]), (0.26, 2.5, [False, False]), (0.1, None, [True, None])],
)
def test_judge_on_cuda_requires_a_million_images_per_second_and_ten_times_kornia(alone_ms, kornia_ms, expected):
    slower = result("NCHW", "kernel", alone=row(1.0))
    rows = {"alone": row(alone_ms)} | ({"kornia": row(kornia_ms)} if kornia_ms else {})
    verdicts = tables.judge("cuda", [slower, result("channels_last", "kernel", **rows)], 250)
    assert [verdict.met for verdict in verdicts] == expected
    assert "channels_last" in verdicts[0].text
    assert [verdict.met for verdict in tables.judge("cuda", [], 256)] == [None, None]


def test_backends_page_has_the_table_of_plans(capsys):
    lacking.require("kornia")
    lacking.require("nvidia.dali")
    assert command.main(["--plans"]) == 0
    table = capsys.readouterr().out
    page = (REPOSITORY / "docs" / "backends.md").read_text()
    comment = "<!-- made by: python -m benchmarks.augmentation --plans -->\n"
    assert f"{comment}{table}\n" in page, f"put this table below {comment!r} in docs/backends.md:\n{table}"


def test_table_of_plans_names_transforms_that_torch_runs(monkeypatch):
    lacking.require("kornia")
    lacking.require("nvidia.dali")
    chain = T.CenterCrop(8), T.Normalize(MEAN, STD), T.MixUp()
    monkeypatch.setattr(command, "everyday", lambda: {"mixing": chain, "crop": chain[:1]})
    assert command.format_plans().splitlines()[2:] == [
        "| mixing: `CenterCrop`, `Normalize`, `MixUp` | 3 | 2; not `MixUp` | 2; not `MixUp` |",
        "| crop: `CenterCrop` | 1 | 1 | 1 |",
        "| all | 4 | 3 | 3 |",
    ]


@pytest.mark.slow
def test_command_prints_and_saves_results(folder, tmp_path, capsys):
    threads = torch.get_num_threads()
    file = tmp_path / "results.json"
    arguments = ["--photos", str(folder), "--quick", "--batch-size", "2", "--only", "ColorJitter,classic"]
    status = command.main([*arguments, "--device", "cpu", "--backends", "torch,fused", "--json", str(file)])
    assert status == 0
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    assert "a plain copy moves" in out
    assert "– not measured: gpuload fused: all: Triton runs on the CPU in its interpreter" in out
    assert "CPU: classic: at most 0.25 ms for an image" in out
    saved = json.loads(file.read_text())
    assert set(saved["versions"]) >= {"torch", "gpuload", "torchvision"}
    cpu = saved["devices"]["cpu"]
    assert [case["name"] for case in cpu["cases"]] == ["classic", "ColorJitter"]
    assert cpu["cases"][0]["rows"]["gpuload torch"]["readings"][0]["ms"] > 0
    assert [row["failed"] for case in cpu["cases"] for row in case["rows"].values() if row["failed"]] == []


@pytest.mark.slow
def test_own_transforms_benchmark_prints_a_line_per_case(capsys):
    assert user_transforms.main(["--rounds", "1", "--batch-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[-len(user_transforms.CASES) :]
    assert [row.split("  ")[0] for row in rows] == list(user_transforms.CASES)
    assert min(float(row.split()[-1]) for row in rows) > 0


@pytest.mark.slow
def test_boxes_benchmark_prints_a_line_per_case(capsys):
    assert boxes.main(["--rounds", "1", "--batch-size", "2"]) == 0
    rows = capsys.readouterr().out.splitlines()[-len(boxes.CASES) :]
    assert [row.split("  ")[0] for row in rows] == list(boxes.CASES)
    assert all(float(row.split()[-1]) > 0 for row in rows)


def test_command_without_cuda_fails(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--photos", str(folder), "--quick", "--device", "cuda"]) == 1
    assert "CUDA: not measured: torch finds no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backends", "tensorflow"], f"--backends takes any of {', '.join(BACKENDS)}, comma-separated"),
        (["--batch-size", "3"], "--batch-size must be even"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(folder, capsys, arguments, text):
    with pytest.raises(SystemExit):
        command.parse(["--photos", str(folder), *arguments])
    assert text in capsys.readouterr().err


def test_photographs_of_an_empty_folder_raise_system_exit(tmp_path):
    with pytest.raises(SystemExit, match="no JPEGs"):
        Photographs(tmp_path, 2, torch.device("cpu"))


def test_cpu_clock_counts_work_and_not_waiting():
    reading = cpu_clock(lambda turn: time.sleep(0.05), 0)
    assert reading.wall_ms >= 50
    assert reading.ms < reading.wall_ms / 2
    assert reading.peak_mb is None


@pytest.mark.cuda
@lacking.skip_on_fake_cuda("a clock of the GPU")
def test_cuda_clock_measures_time_and_memory():
    source = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    turns: list[int] = []

    def run(turn):
        turns.append(turn)
        return source.clone()

    reading = CudaClock(most=50)(run, 2)
    assert 0 < reading.ms < 50
    assert reading.peak_mb == pytest.approx(len(source) / 1e6, rel=0.1)
    assert turns == list(range(100, 100 + len(turns)))
    assert 1 < len(turns) <= 50
    assert copy_bandwidth(torch.device("cuda")) > 1e10


@pytest.mark.cuda
@lacking.skip_on_fake_cuda("CUDA graphs")
@pytest.mark.parametrize("case", headline(), ids=lambda case: case.name)
def test_headline_contenders_run_on_cuda(case, folder):
    photographs = Photographs(folder, COUNT, torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_name = kernels_alone(case, photographs) | contenders(
            case, photographs, BACKENDS, ["tensors", "batch", "kornia"]
        )
        for name, contender in by_name.items():
            if isinstance(contender, Contender):
                batch = contender.run(1)
                if name == tables.KERNELS_REPLAYED:
                    continue  # it has no result to look at
                assert (tuple(batch.shape), batch.dtype) == ((COUNT, 3, 224, 224), torch.float16), name
    assert isinstance(by_name["gpuload fused"], Contender)
    assert np.isfinite(by_name["gpuload fused"].run(2).float().cpu().numpy()).all()
