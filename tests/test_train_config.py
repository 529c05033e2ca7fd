"""How training is set up: presets, TOML, single settings, and every problem at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from factpatch.editors import METHODS, EditorConfig
from factpatch.editors.registry import Method
from factpatch.errors import InputError
from factpatch.training import PRESETS, TrainConfig, resolve_config
from factpatch.training.config import config_to_json


def test_every_preset_is_a_config() -> None:
    for preset in PRESETS:
        config = resolve_config(preset, None, [], {})
        assert resolve_config(None, None, [], config_to_json(config)) == config


def test_a_merge_replaces_the_least_squares_form() -> None:
    assert resolve_config("fc", None, [], {}).ridge == 1
    assert resolve_config("fc", None, ["together=8"], {}).ridge is None


def test_none_unsets_an_optional_setting() -> None:
    assert resolve_config("fc", None, ["ridge=none"], {}).ridge is None
    with pytest.raises(InputError, match="rows='none' must be a whole number"):
        resolve_config("fc", None, ["rows=none"], {})


@pytest.mark.parametrize(
    ("preset", "rows", "margins"), [("paper-fc", 256, (1e-1, 1e-3)), ("paper-qa", 64, (1e-3, 1e-5))]
)
def test_the_papers_schedules(preset: str, rows: int, margins: tuple[float, float]) -> None:
    config = resolve_config(preset, None, [], {})
    assert (config.steps, config.warmup, config.edits, config.rows) == (200_000, 1000, 4, rows)
    assert config.validate_epochs
    assert (config.margin, config.margin_floor) == margins
    assert (config.optimizer, config.lr, config.multiplier_lr, config.weight_decay) == ("adam", 3e-4, 1e-1, 1e-2)
    assert (config.margin_factor, config.anneal_above, config.multiplier_schedule) == (0.8, 0.9, "linear")
    assert config.label_smoothing == (0.1 if preset == "paper-qa" else 0.0)
    assert config.editor == EditorConfig()


def test_later_sources_win(tmp_path: Path) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text('lr = 1e-3\nsteps = 7\nlayers = ["encoder.*"]\n[editor]\nwidth = 256\nlstm = 32\n')
    settings = ["editor.width=512", "lr=3e-4", "clip=1", "constraint=both", "editor.gradients=false"]
    config = resolve_config("qa", toml, settings, {"steps": 9, "minutes": None})
    assert (config.lr, config.steps, config.clip, config.constraint) == (3e-4, 9, 1.0, "both")
    assert config.editor == EditorConfig(width=512, lstm=32, gradients=False)
    assert config.layers == ("encoder.*",)
    assert config.label_smoothing == 0.1, "the preset's, where nobody says otherwise"


@dataclass(frozen=True)
class OneSetting:
    depth: int = 3


class Toy:
    config_class = OneSetting


def test_the_editors_settings_are_those_of_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "toy", Method("Toy", f"{__name__}:Toy", trainable=True))
    assert resolve_config("fc", None, ["method=toy"], {}).editor == OneSetting(3)
    config = resolve_config("fc", None, ["method=toy", "editor.depth=5"], {})
    assert config.editor == OneSetting(5)
    assert resolve_config(None, None, [], config_to_json(config)) == config
    with pytest.raises(InputError, match=r"unknown setting editor.width; known settings are depth"):
        resolve_config("fc", None, ["method=toy", "editor.width=5"], {})


def test_a_config_without_a_method_is_of_the_first_version() -> None:
    saved = config_to_json(TrainConfig(editor=EditorConfig(width=32)))
    assert saved.pop("method") == "hyper"
    assert resolve_config(None, None, [], saved).editor == EditorConfig(width=32)


def test_steps_given_later_take_the_place_of_minutes(tmp_path: Path) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text("minutes = 10\n")
    assert resolve_config("fc", toml, [], {}).minutes == 10
    assert resolve_config("fc", toml, [], {"steps": 9}).minutes is None
    assert resolve_config("fc", toml, ["steps=9"], {}).minutes is None
    assert resolve_config("fc", None, ["steps=9"], {"minutes": 1.0}).minutes == 1


def test_all_problems_at_once() -> None:
    settings = ["steps=0", "optimizer=sgd", "learning_rate=1", "rows=many", "editor.depth=3", "nonsense", "editor=1"]
    settings += ["margin=1e-5", "holdout=1", f"seed={2**70}"]
    with pytest.raises(InputError) as caught:
        resolve_config("fc", None, settings, {"minutes": -1.0})
    message = str(caught.value)
    for part in (
        "steps=0 must be above 0",
        "minutes=-1.0 must be above 0",
        "optimizer=sgd must be one of rmsprop, adam",
        "margin=1e-05 must not be below margin_floor=0.0002",
        "holdout=1 must be at least 2",
        "must be below 2**63",
        "unknown setting learning_rate",
        "rows='many' must be a whole number",
        "expected key=value, found 'nonsense'",
    ):
        assert part in message
    assert "editor" in message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["rows=2"], "rows=2 must be at least 3"),
        (["rows=5", "kl_over=beam"], "rows=5 must be at least 7"),
        (["edits=2", "split=3"], "split=3 must not be above edits=2"),
        (["margin_factor=1.0"], "margin_factor=1.0 must be below 1"),
        (["lr=nan"], "lr=nan must be above 0"),
        (["lr=true"], "lr=True must be a number"),
        (["editor.width=0"], "found width=0"),
        (["layers=[]"], "layers must name at least one"),
        (["others=[]"], "others must name at least one choice"),
        (['others=["near","near"]'], "and each only once"),
        (["others=far"], "others=far must be one of uniform, unsure, near"),
        (['targets=["gold","silver"]'], "targets=silver must be one of beam, gold, relation, invented"),
        (['others=["near","unsure"]', "rows=3"], "rows=3 must be at least 4"),
        (["ema=1"], "ema=1.0 must be above 0 and below 1"),
        (["editor.depth=3"], "unknown setting editor.depth"),
        (["method=hypr"], "there is no edit method called 'hypr'; did you mean hyper?"),
        (["method=finetune"], "method=finetune cannot be trained; choose one of hyper"),
        (["method=hypr", "editor.depth=3", "lr=-1"], "lr=-1.0 must be above 0"),
    ],
)
def test_single_problems(settings: list[str], reason: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_config("fc", None, settings, {})
    assert reason in str(caught.value)


def test_configs_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="paper-fc"):
        resolve_config("fc", tmp_path / "none.toml", [], {})
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(InputError, match=r"is not a TOML file.*; correct it"):
        resolve_config("fc", broken, [], {})


def test_rows_without_control_inputs() -> None:
    """Without KL no control inputs are needed."""
    config = TrainConfig(constraint="none", rows=2)
    assert (config.controls_per_edit, config.constraints) == (0, ())
    assert TrainConfig(kl_over="beam", rows=16).controls_per_edit == 2
    assert TrainConfig(paraphrases="none", rows=16).controls_per_edit == 15
