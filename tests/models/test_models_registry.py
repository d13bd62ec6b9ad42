"""Models by name: what is unknown is refused with a hint, and functions of one's own work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from unlatch import models
from unlatch.errors import ConfigError
from unlatch.models import MLP


def test_all_promised_names_are_there() -> None:
    promised = (
        "mlp resnet20 resnet32 resnet56 resnet110 resnet8 resnet14 resnet18 resnet34 resnet50 wrn28-10 vgg11 vgg16 gpt "
        "revnet18 revnet34 revnet50 revnet8 revnet14 revnet20 revnet-fixed irevnet rev-vit rev-gpt plain-conv"
    )
    assert set(models.names()) == set(promised.split())


@pytest.mark.parametrize(("wrong", "meant"), [("resnet-20", "resnet20"), ("WRN28-10", "wrn28-10"), ("gtp", "gpt")])
def test_unknown_name_gets_a_hint_and_the_list(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        models.build(wrong)
    text = str(error.value)
    assert f"unknown model {wrong!r}. Did you mean {meant!r}?" in text
    assert all(name in text for name in models.names())


def test_name_far_from_all_gets_the_list_only() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'zzzz'\. Known: mlp"):
        models.build("zzzz")


def test_unknown_option_gets_a_hint_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'widht'\. Did you mean 'width'\? Its options: classes, in_channels, width"):
        models.build("resnet20", widht=8)


def test_options_reach_the_model() -> None:
    model = models.build("mlp", widths=[4, 3, 2], activation="tanh")
    assert [tuple(p.shape) for p in model.parameters()] == [(3, 4), (3,), (2, 3), (2,)]


def test_options_for_data_of_each_kind() -> None:
    assert models.options_for("mlp", (3, 4, 4), 7) == {"widths": (48, 128, 128, 128, 7)}
    assert models.options_for("resnet20", (1, 8, 8), 10) == {"in_channels": 1, "classes": 10}
    assert models.options_for("resnet50", (3, 224, 224), 1000)["stem"] == "imagenet"
    assert models.options_for("vgg16", (3, 32, 32), 10)["head"] == "small"
    assert models.options_for("gpt", (128,), 65) == {"vocabulary": 65, "context": 128}
    assert models.options_for("some.where:model", (128,), 65) == {}
    assert models.options_for("revnet34", (3, 32, 32), 10) == {"in_channels": 3, "classes": 10, "stem": "small"}
    assert models.options_for("revnet20", (1, 8, 8), 10) == {"in_channels": 1, "classes": 10}
    assert models.options_for("rev-vit", (1, 28, 28), 10) == {"in_channels": 1, "classes": 10, "image": 28}
    assert models.options_for("rev-gpt", (128,), 65) == {"vocabulary": 65, "context": 128}


def test_model_and_data_of_different_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes images .* shape \(128,\)"):
        models.options_for("resnet18", (128,), 65)
    with pytest.raises(ConfigError, match=r"takes sequences .* shape \(3, 32, 32\)"):
        models.options_for("gpt", (3, 32, 32), 10)
    with pytest.raises(ConfigError, match=r"takes square images, the data are of shape \(3, 32, 24\)"):
        models.options_for("rev-vit", (3, 32, 24), 10)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_for_test.py").write_text(
        "import torch\n"
        "def small(width=3):\n    return torch.nn.Linear(width, 2)\n"
        "def wrong():\n    return 5\n"
        "constant = 7\n"
    )
    (tmp_path / "own_broken_for_test.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own_module")
def test_function_of_ones_own() -> None:
    model = models.build("own_models_for_test:small", width=5)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5


@pytest.mark.usefixtures("own_module")
def test_faults_of_functions_of_ones_own() -> None:
    with pytest.raises(ConfigError, match=r"no function 'smal' in it\. Did you mean 'small'\?"):
        models.build("own_models_for_test:smal")
    with pytest.raises(ConfigError, match="constant is an object of int, made already: expected a class or a function"):
        models.build("own_models_for_test:constant")
    with pytest.raises(ConfigError, match=r"returned int: expected a torch\.nn\.Module"):
        models.build("own_models_for_test:wrong")
    with pytest.raises(ConfigError, match="there is no module 'not_there_for_test'"):
        models.build("not_there_for_test.models:small")
    with pytest.raises(ConfigError, match="not of the form"):
        models.build(":small")


@pytest.mark.usefixtures("own_module")
def test_defect_inside_ones_own_module_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        models.build("own_broken_for_test:model")


def test_mlp_settings() -> None:
    with pytest.raises(ConfigError, match=r"unknown activation 'rleu'\. Did you mean 'relu'\?"):
        MLP((4, 3, 2), activation="rleu")
    with pytest.raises(ConfigError, match="do not make an MLP"):
        MLP((4,))
    model = MLP((4, 3, 3, 2), dropout=0.5, batch_norm=True)
    kinds = [[type(part).__name__ for part in block] for block in model.layers]
    assert kinds == [
        ["Flatten", "Linear", "BatchNorm1d", "ReLU", "Dropout"],
        ["Linear", "BatchNorm1d", "ReLU", "Dropout"],
        ["Linear"],
    ]


def test_mlp_with_identity_is_linear() -> None:
    model = MLP((4, 3, 2), activation="identity").double()
    a, b = torch.randn(2, 1, 4, dtype=torch.float64)
    torch.testing.assert_close(model(a) + model(b), model(a + b) + model(torch.zeros_like(a)))
