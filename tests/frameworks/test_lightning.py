"""Lightning's fit loop with a `Loader`: batches, epochs, checkpoints, and Augment with torch's DataLoader."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from frameworks.jobs import LIMIT_S, logged_steps, run, run_successfully
from helpers.warm_interpreters import warm_interpreters

pytestmark = pytest.mark.timeout(4 * LIMIT_S)

IMPORTS = """
# torchmetrics, which Lightning imports, would import torchvision if it is installed. This takes a second or two, and
# fails if torchvision was built for another torch. It is not needed here.
import importlib.metadata
import sys

import lightning_utilities.core.imports as imports

installed = imports._version


def version(name):
    if name == "torchvision":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)


imports._version = version
sys.modules["torchvision"] = None
import pytorch_lightning as pl
"""

LIGHTNING = (
    IMPORTS
    + '''
class Data(pl.LightningDataModule):
    """The DataModule of docs/frameworks.md."""

    info = False
    num_workers = 0

    def setup(self, stage):
        self.train_loader = gl.Loader(
            Numbered(53), 4, shuffle=True, seed=3, transforms=CHAIN, num_workers=self.num_workers, device="cpu",
            info=self.info,
        )
        self.val_loader = gl.Loader(
            Numbered(20), 4, transforms=[T.CenterCrop(8), T.ToDtype("float32", scale=True)], num_workers=0, device="cpu"
        )

    def train_dataloader(self):
        return self.train_loader

    def val_dataloader(self):
        return self.val_loader

    def state_dict(self):
        return self.train_loader.state_dict()

    def load_state_dict(self, state):
        self.train_loader.load_state_dict(state)


class Model(pl.LightningModule):
    def __init__(self, record_step):
        super().__init__()
        self.record_step = record_step
        self.validated = 0
        self.linear = torch.nn.Linear(3 * 8 * 8, 1)

    def training_step(self, batch, batch_idx):
        images, numbers = batch
        self.record_step(self.current_epoch, images, numbers)
        return self.linear(images.flatten(1)).mean()

    def validation_step(self, batch, batch_idx):
        self.validated += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "default_root_dir": str(folder),
}
'''
)


@pytest.fixture(scope="module")
def popen():
    with warm_interpreters(IMPORTS) as popen:
        yield popen


TWO_RANKS = (
    LIGHTNING
    + """
from pytorch_lightning.callbacks import ModelCheckpoint

log = StepLog(options["name"])
Data.num_workers = 1


def record_step(epoch, images, numbers):
    if trainer.global_step == options["kill_at"] and trainer.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    log.log(epoch, images, numbers)


pl.seed_everything(0)
trainer = pl.Trainer(
    max_epochs=3, devices=2, strategy="ddp",
    callbacks=[ModelCheckpoint(folder, every_n_train_steps=5, save_last=True)], **QUIET,
)
model, data = Model(record_step), Data()
trainer.fit(model, datamodule=data, ckpt_path=options["ckpt_path"])
assert trainer.train_dataloader is data.train_loader and trainer.val_dataloaders is data.val_loader
assert trainer.num_training_batches == len(data.train_loader) == 7
assert model.validated > 0
"""
)

ONE_PROCESS = (
    LIGHTNING
    + """
class Save(pl.Callback):
    \"\"\"A callback that saves once, after a number of steps, in one of the hooks in which ModelCheckpoint saves.\"\"\"

    def __init__(self, where, after):
        self.where, self.after = where, after

    def save(self, where, trainer):
        if where == self.where and trainer.global_step == self.after and not trainer.sanity_checking:
            trainer.save_checkpoint(folder / "one.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save("batch", trainer)

    def on_validation_end(self, trainer, *_):
        self.save("validation", trainer)

    def on_train_epoch_end(self, trainer, *_):
        self.save("epoch", trainer)


class DataWithoutState(Data):
    \"\"\"A DataModule that leaves the state to Lightning.\"\"\"

    state_dict = pl.LightningDataModule.state_dict
    load_state_dict = pl.LightningDataModule.load_state_dict


def fit(save=None, ckpt_path=None, data=Data, **options):
    seen = []

    def record_step(epoch, images, numbers):
        seen.append([epoch, data.train_loader.epoch, numbers.tolist(), digest(images)])

    data, callbacks = data(), [save] if save else []
    trainer = pl.Trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=False, **QUIET, **options)
    trainer.fit(Model(record_step), datamodule=data, ckpt_path=ckpt_path)
    return seen


undisturbed = fit()
results = {"undisturbed": undisturbed, "without sanity check": fit(num_sanity_val_steps=0)}
for name, (where, after, without_state, trainer_options) in options.items():
    data = DataWithoutState if without_state else Data
    uninterrupted = fit(Save(where, after), data=data, **trainer_options)
    resumed = fit(ckpt_path=folder / "one.ckpt", data=data, **trainer_options)
    results[name] = [uninterrupted[after:], resumed]


class Informed(Data):
    info = True


class AlreadyOnTheDevice(Informed):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


Plain = Model


class InfoModel(Model):
    def training_step(self, batch, batch_idx):
        batch, info = batch
        assert info.step == batch_idx
        return super().training_step(batch, batch_idx)


Model = InfoModel
for name, data in {"info": Informed, "info, already on the device": AlreadyOnTheDevice}.items():
    try:
        results[name] = fit(data=data)
    except ValueError as error:
        results[name] = str(error)


class Unshuffled(Data):
    def setup(self, stage):
        super().setup(stage)
        self.train_loader = gl.Loader(Numbered(53), 4, transforms=CHAIN, num_workers=0, device="cpu")


class InOrder(Data):
    def setup(self, stage):
        super().setup(stage)
        options = {"sampler": torch.utils.data.SequentialSampler(range(53)), "transforms": CHAIN, "num_workers": 0}
        self.train_loader = self.val_loader = gl.Loader(Numbered(53), 4, device="cpu", **options)


Model = Plain
for name, data, trainer_options in [
    ("overfit", Data, {"overfit_batches": 2}),
    ("overfit, unshuffled", Unshuffled, {"overfit_batches": 2}),
    ("overfit, in order", InOrder, {"overfit_batches": 2}),
    ("limited, unshuffled", Unshuffled, {"limit_train_batches": 2}),
]:
    try:
        results[name] = fit(data=data, **trainer_options)
    except TypeError as error:
        results[name] = str(error)
(folder / "results.json").write_text(json.dumps(results))
"""
)


def test_killed_and_resumed_job_on_two_ranks_sees_the_batches_of_an_undisturbed_job(tmp_path, popen):
    def options(name, *, kill_at=None, ckpt_path=None):
        return {"name": name, "kill_at": kill_at, "ckpt_path": ckpt_path}

    run_successfully(tmp_path, TWO_RANKS, options("undisturbed"), ranks=2, popen=popen)
    for checkpoint in tmp_path.glob("*.ckpt"):
        checkpoint.unlink()
    # The checkpoint is saved in the second epoch, after 10 steps; the job is killed two steps later.
    status, output = run(tmp_path, TWO_RANKS, options("killed", kill_at=12), ranks=2, popen=popen)
    assert status != 0, output
    resumed_options = options("resumed", ckpt_path=str(tmp_path / "last.ckpt"))
    assert "not resumable" not in run_successfully(tmp_path, TWO_RANKS, resumed_options, ranks=2, popen=popen)
    undisturbed = [logged_steps(tmp_path, "undisturbed", rank) for rank in (0, 1)]
    for rank in (0, 1):
        killed, resumed = (logged_steps(tmp_path, name, rank) for name in ("killed", "resumed"))
        assert len(undisturbed[rank]) == 21
        assert len(killed) >= 10
        assert killed == undisturbed[rank][: len(killed)]
        assert killed[:10] + resumed == undisturbed[rank]
    for epoch in (0, 1, 2):
        batches = [numbers for steps in undisturbed for step_epoch, numbers, _ in steps if step_epoch == epoch]
        numbers = list(itertools.chain(*batches))
        assert sorted(set(numbers)) == list(range(53))
        assert len(numbers) == 54  # one sample is repeated, so that both ranks have 27


# For each case: the hook that saves the checkpoint, the number of steps before it (an epoch has 14), whether only
# Lightning keeps the state, and options of Trainer.
CASES = {
    "in the first epoch": ("batch", 3, False, {}),
    "in the second epoch": ("batch", 16, False, {}),
    "after an epoch's last batch": ("batch", 14, False, {}),
    "after a validation within an epoch": ("validation", 20, False, {"val_check_interval": 6}),
    "after the validation at an epoch's end": ("validation", 14, False, {}),
    "at an epoch's end": ("epoch", 14, False, {}),
    "at an epoch's end without validation": ("epoch", 14, False, {"limit_val_batches": 0}),
    "stateless: in the second epoch": ("batch", 16, True, {}),
    "stateless: at an epoch's end": ("epoch", 14, True, {}),
    "cut short": ("batch", 6, False, {"limit_train_batches": 6}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, popen):
    folder = tmp_path_factory.mktemp("one")
    run_successfully(folder, ONE_PROCESS, CASES, popen=popen)
    return json.loads((folder / "results.json").read_text())


def test_sanity_check_does_not_disturb_the_training_loader(results):
    assert results["undisturbed"] == results["without sanity check"]
    assert [epoch for epoch, *_ in results["undisturbed"]] == [0] * 14 + [1] * 14
    for epoch in (0, 1):
        batches = [numbers for step_epoch, _, numbers, _ in results["undisturbed"] if step_epoch == epoch]
        assert sorted(itertools.chain(*batches)) == list(range(53))


def test_loader_epochs_are_those_of_lightning(results):
    epochs = [(epoch, loader_epoch) for epoch, loader_epoch, *_ in results["undisturbed"]]
    assert epochs == [(0, 0)] * 14 + [(1, 1)] * 14


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("stateless: at an epoch's end", "cut short")])
def test_fit_resumed_from_a_checkpoint_sees_the_remaining_batches(results, case):
    expected, resumed = results[case]
    assert expected
    assert resumed == expected


def test_resume_after_an_epoch_without_datamodule_state_repeats_the_first_order(results):
    """Lightning restores the states of loaders only within an epoch, so the DataModule has to keep these states."""
    _, resumed = results["stateless: at an epoch's end"]
    first_epoch = results["undisturbed"][:14]
    assert [step for _epoch, *step in resumed] == [step for _epoch, *step in first_epoch]


@pytest.mark.parametrize("case", ["info", "info, already on the device"])
def test_fit_with_info_sees_the_batches_of_fit_without_info(results, case):
    assert results[case] == results["undisturbed"]


def test_resume_after_limit_train_batches_continues_the_epoch(results):
    """A checkpoint at the limit resumes with the batches after it."""
    expected, resumed = results["cut short"]
    assert [epoch for epoch, *_ in expected] == [epoch for epoch, *_ in resumed] == [1] * 6
    assert resumed[:6] != expected
    following_steps = results["undisturbed"][6:12]
    assert [numbers for _, _, numbers, _ in resumed] == [numbers for _, _, numbers, _ in following_steps]


def test_overfit_batches_raises_and_names_the_alternative(results):
    """With torch's `SequentialSampler`, Lightning leaves a loader unchanged, and nothing is raised."""
    for name in ("overfit", "overfit, unshuffled"):
        assert results[name] == (
            "overfit_batches would replace this gpuload.Loader with a torch DataLoader, which drops the transforms; "
            "use Trainer(limit_train_batches=…) instead of overfit_batches, and gpuload.Loader(shuffle=False), whose "
            "epochs all begin with the same samples"
        )
    for name in ("overfit, in order", "limited, unshuffled"):
        assert [numbers for _, _, numbers, _ in results[name]] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


# -- Augment with torchdata's loader -----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "keep_your_loader.md"
AUGMENTED = (
    "mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)\n"
    + "\n".join(re.findall(r"```python\n(class [^\n]*\n.*?)```", PAGE.read_text(), re.DOTALL))
    + """
from torchdata.stateful_dataloader import StatefulDataLoader

SIDE = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, 1))
IMAGES = torch.randint(0, 256, (14, 3, 24, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
BOXES = np.array([[2, 3, 20, 18]], np.float32)


def mixin(base):
    class Learning(base):
        def __init__(self):
            super().__init__(SIDE)
            self.seen, self.validated = [], []

        def training_step(self, batch, batch_idx):
            images, labels = batch
            self.seen.append([self.current_epoch, digest(images), describe(labels)])
            return self.network(images).mean()

        def validation_step(self, batch, batch_idx):
            self.validated.append(digest(batch[0]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    return Learning


def describe(labels):
    return labels.tolist() if isinstance(labels, torch.Tensor) else [target["boxes"].tolist() for target in labels]


class Save(pl.Callback):
    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer, *others):
        if trainer.global_step == self.after:
            trainer.save_checkpoint(folder / f"{self.after}.ckpt")


def collate(samples):
    images, targets = zip(*samples)
    return list(images), list(targets)


class Plain(pl.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network


def fit(base, samples, ckpt_path=None, save_after=5, data=None, **loading):
    loaders = [StatefulDataLoader(samples, batch_size=size, **loading) for size in (4, 7)]
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[Save(save_after)], enable_checkpointing=False, default_root_dir=str(folder), **quiet
    )
    model = mixin(base)()
    source = {"datamodule": data(*loaders)} if data else dict(zip(("train_dataloaders", "val_dataloaders"), loaders))
    trainer.fit(model, ckpt_path=ckpt_path, **source)
    return model


def expected(targets):
    augment, seen = Classifier(SIDE).augment, []
    for epoch in range(2):
        for start in range(0, 14, 4):
            rows = slice(start, start + 4)
            images, labels = augment(IMAGES[rows], targets(rows), positions=range(14)[rows], epoch=epoch)
            seen.append([epoch, digest(images), describe(labels)])
    return seen


numbered = list(zip(IMAGES, range(14)))
boxed = [(image, {"boxes": gl.Boxes(BOXES)}) for image in IMAGES]
uninterrupted = fit(Classifier, numbered)
results = {
    "numbered": [uninterrupted.seen, expected(lambda rows: torch.arange(14)[rows])],
    "resumed": [fit(Classifier, numbered, ckpt_path=folder / "5.ckpt").seen, uninterrupted.seen[5:]],
    "validated": uninterrupted.validated,
    "boxed": [fit(Detector, boxed, collate_fn=collate).seen, expected(lambda rows: [boxed[0][1]] * len(IMAGES[rows]))],
}
with_datamodule = fit(Plain, numbered, data=AugmentedData)
results["in a DataModule"] = [with_datamodule.seen, results["numbered"][1]]
results["validated in a DataModule"] = with_datamodule.validated
for after in (2, 5):
    fit(Plain, numbered, save_after=after, data=AugmentedData)
    seen = fit(Plain, numbered, ckpt_path=folder / f"{after}.ckpt", save_after=None, data=AugmentedData).seen
    results[f"resumed after {after} batches in a DataModule"] = [seen, with_datamodule.seen[after:]]
(folder / "results.json").write_text(json.dumps(results))
"""
)


@pytest.fixture(scope="module")
def augment_results(tmp_path_factory, popen):
    folder = tmp_path_factory.mktemp("augmented")
    run_successfully(folder, IMPORTS + AUGMENTED, {}, popen=popen)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", ["numbered", "boxed", "in a DataModule"])
def test_augment_in_lightning_hooks_gives_the_expected_batches(augment_results, case):
    seen, expected = augment_results[case]
    assert len(seen) == 8
    assert seen == expected


@pytest.mark.parametrize(
    ("case", "batches"),
    [("resumed", 3), ("resumed after 2 batches in a DataModule", 6), ("resumed after 5 batches in a DataModule", 3)],
)
def test_augment_resumed_from_a_checkpoint_gives_the_remaining_batches(augment_results, case, batches):
    seen, expected = augment_results[case]
    assert len(seen) == batches
    assert seen == expected


@pytest.mark.parametrize("case", ["validated", "validated in a DataModule"])
def test_augment_in_validation_draws_nothing(augment_results, case):
    """Validation ran on two batches in the sanity check, and in two epochs."""
    sanity, epochs = augment_results[case][:2], augment_results[case][2:]
    assert (len(sanity), epochs) == (2, sanity * 2)
