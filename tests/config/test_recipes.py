"""The configs for real models: each is valid, fits what its first lines say, and ends at once where there is no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ajet.backbone.local import placement
from ajet.cli.main import main

ROOT = Path(__file__).parents[2]
GPUS = {
    "qwen3_0.6b_1gpu": 24,
    "qwen3_8b_lora_1gpu": 48,
    "qwen2.5_7b_1xh200": 139,
    "qwen3.5_4b_lora_1gpu": 48,
    "qwen3.5_9b_1xh200": 139,
    "qwen3_30b_a3b_8gpu_verl": 80,
    "qwen2.5_7b_8gpu_verl": 80,
    "qwen2.5_7b_2nodes_verl": 80,
}
"""GiB of each GPU that a config is meant for."""
ON_LOCAL = [name for name in GPUS if not name.endswith("verl")]


def text_of(name: str) -> str:
    return (ROOT / "configs" / f"{name}.yaml").read_text()


def planned(name: str) -> str:
    """The GiB that a config says it takes."""
    found = re.search(r"# Planned[\w ]*: ([\d.]+) GiB", text_of(name))
    assert found
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_fits_as_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["validate", f"configs/{name}.yaml", "--plan", "--gpu", str(GPUS[name])]) == 0
    said = capsys.readouterr().out
    assert f"it fits: each GPU has {GPUS[name]}.0 GiB" in said
    assert re.search(r"together +([\d.]+) GiB", said)[1] == planned(name)  # type: ignore[index]
    assert float(planned(name)) <= 0.9 * GPUS[name]


@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_says_what_it_takes_what_to_watch_and_how_to_run_it(name: str) -> None:
    head = text_of(name).partition("ajet:\n")[0]
    assert f"ajet --conf configs/{name}.yaml" in head
    assert f"ajet validate configs/{name}.yaml --gpu {GPUS[name]}" in head
    assert "Not yet measured on a GPU." in head and "atch " in head
    for page in ("configs/README.md", "docs/real_models.md"):
        assert f"{name}.yaml`" in (ROOT / page).read_text()
    row = next(line for line in (ROOT / "docs/real_models.md").read_text().splitlines() if f"`configs/{name}" in line)
    assert row.endswith(f" {planned(name)} GiB |")


@pytest.mark.parametrize("name", ON_LOCAL)
def test_without_a_gpu_a_recipe_ends_at_once_with_the_cause(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)  # on a machine that has some
    assert main(["--conf", f"configs/{name}.yaml", "--exp-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "ajet.trainer_common.gpu names GPU 0, and PyTorch finds no CUDA device here (" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("there", "built", "serves", "hidden", "cause"),
    [
        (True, None, "12.4", None, "is a build without CUDA"),
        (False, "12.8", None, None, "the machine has none"),
        (True, "12.8", None, None, "libcuda.so.1 of its driver can't be loaded"),
        (True, "12.8", "11.4", None, "its driver is too old: it serves CUDA 11.4, and torch"),
        (True, "12.8", "12.4", "", "CUDA_VISIBLE_DEVICES='' hides it"),
        (True, "12.8", "12.4", None, "can't use it"),
    ],
)
def test_why_there_is_no_gpu(
    there: bool, built: str | None, serves: str | None, hidden: str | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock of the machine: none of these can be brought about in a test."""
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")] if there else []))
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr(placement, "_driver_serves", lambda: serves)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    none = placement.why_no_gpu()
    assert cause in none.cause and none.there is there and none.fix
