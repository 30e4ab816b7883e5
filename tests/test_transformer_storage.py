"""Saved transformers load bit for bit; anything else is one clear error, and nothing is left half-written."""

import pickle
from pathlib import Path

import pytest
import torch

from helpers.encodings import Encoding, Learned, Rotary
from helpers.tasks.two_hop import TwoHop
from helpers.transformer import (
    TrainedTransformers,
    TransformerSettings,
    TransformerTraining,
    load_transformers,
    save_transformers,
    train_transformers,
)


def train(encoding: Encoding, dtype: torch.dtype = torch.float32) -> TrainedTransformers:
    models = [TransformerSettings(encoding, vocab_size=5, width=16, num_heads=2, seed=seed) for seed in (4, 2)]
    task = TwoHop(vocab_size=5, offset=1, reach=2)
    training = TransformerTraining(task=task, train_length=9, steps=3, batch_size=2)
    return train_transformers(models, training, dtype=dtype)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_transformers(train(Rotary()), tmp_path / "set.pt")
    return tmp_path / "set.pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("encoding", [Rotary(base=77.0, pairs="half"), Learned(table_length=9, row_std=0.3)])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, encoding: Encoding, dtype: torch.dtype) -> None:
    trained = train(encoding, dtype)
    save_transformers(trained, tmp_path / "set.pt")
    loaded = load_transformers(tmp_path / "set.pt")
    assert loaded.batch.models == trained.batch.models
    assert loaded.training == trained.training
    assert loaded.status == trained.status
    assert torch.equal(loaded.losses, trained.losses)
    assert list(loaded.batch.parameters) == list(trained.batch.parameters)
    for name, value in trained.batch.parameters.items():
        assert loaded.batch.parameters[name].dtype == dtype
        assert torch.equal(loaded.batch.parameters[name], value)
    tokens = torch.randint(5, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.batch(tokens), trained.batch(tokens))
    assert [path.name for path in tmp_path.iterdir()] == ["set.pt"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_named(saved: Path, share: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"set\.pt is not a whole file of trained transformers: .") as error:
        load_transformers(saved)
    assert "\n" not in str(error.value)


class Runs:
    """Unpickling an instance would create the file it was made with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_foreign_file_is_named_and_runs_no_code(tmp_path: Path) -> None:
    path, trace = tmp_path / "set.pt", tmp_path / "trace"
    writers = [
        lambda: path.write_text("offset,accuracy\n5,1.0\n"),
        lambda: path.write_bytes(pickle.dumps({"format": Runs(trace)})),
        lambda: torch.save({"format": Runs(trace)}, path),
        lambda: torch.save({"weights": torch.zeros(3)}, path),
        lambda: torch.save(torch.zeros(3), path),
        lambda: torch.save({"format": "another, 1"}, path),
    ]
    for write in writers:
        write()
        with pytest.raises(ValueError, match=r"set\.pt is not a whole file of trained transformers: ."):
            load_transformers(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["parameters"].pop("0.up"), "parameters="),
        (lambda content: content["models"].pop(), "parameters="),
        (lambda content: content["status"].pop(), "status="),
        (lambda content: content["models"][0].update(width=15), "width=15 is not allowed"),
        (lambda content: content["training"]["task"].update(name="juggling"), "task='juggling' is not allowed"),
        (lambda content: content["training"].update(steps=5), "losses="),
    ],
)
def test_contents_that_do_not_fit_together_are_named(saved: Path, change, message: str) -> None:
    content = torch.load(saved, weights_only=True)
    change(content)
    torch.save(content, saved)
    with pytest.raises(ValueError, match="is not a whole file of trained transformers") as error:
        load_transformers(saved)
    assert message in str(error.value)


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_transformers(tmp_path / "set.pt")


def test_a_failed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def half(content: object, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space left"):
        save_transformers(train(Rotary()), saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["set.pt"]


def test_an_encoding_that_is_not_registered_cannot_be_saved(tmp_path: Path) -> None:
    class Private(Rotary):
        name = "private"

    with pytest.raises(ValueError, match="is not allowed: encoding must be a registered one"):
        save_transformers(train(Private()), tmp_path / "set.pt")
    assert list(tmp_path.iterdir()) == []
