import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dino_vit
from dino_vit import VisionTransformer, load_backbone, save_backbone
from dino_vit.cli import main
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from tests.support.peers import timm_vit

SMALL = [
    "data.source=synthetic:64:32",
    *("model.arch=null", "model.width=32", "model.depth=1", "model.heads=2", "model.patch_size=8"),
    *("head.prototypes=64", "head.hidden_dim=16", "views.global_size=32", "views.local_size=16"),
]


@pytest.fixture
def weights(tmp_path):
    model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2, position_mode="dino")
    path = tmp_path / "mine.safetensors"
    save_backbone(model, path, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), network="teacher", step=12)
    return path


@pytest.mark.parametrize(
    "command", [[str(Path(sys.executable).with_name("dino-vit"))], [sys.executable, "-m", "dino_vit"]]
)
def test_the_console_command_and_the_module_are_the_same(command):
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"dino-vit {dino_vit.__version__}"


def test_help_needs_no_torch():
    code = (
        "import sys; from dino_vit.cli import build_parser; build_parser().format_help();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_reader_that_has_seen_enough_is_no_error(weights):
    command = f"set -o pipefail; {sys.executable} -m dino_vit inspect-weights {weights} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert "Broken pipe" not in done.stderr


def test_inspect_weights_in_words_and_as_json(weights, capsys):
    assert main(["inspect-weights", str(weights)]) == 0
    said = capsys.readouterr().out
    assert "ViT/8" in said
    assert "0.1, 0.2, 0.3" in said
    assert main(["inspect-weights", str(weights), "--json", "--image-size", "16", "40"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["grid"], facts["network"], facts["step"], facts["heads"]) == ([2, 5], "teacher", 12, 2)
    assert facts["parameters"] == sum(
        tensor.numel() for tensor in load_backbone(weights, image_size=(16, 40)).parameters()
    )


@pytest.mark.parametrize("format", ["reference", "timm", "torchvision", "huggingface"])
def test_export_to_every_format_and_back(weights, tmp_path, format, capsys):
    out = tmp_path / ("out" if format == "huggingface" else "out.pth")
    assert main(["export", str(weights), str(out), "--format", format]) == 0
    images = torch.randn(1, 3, 32, 32)
    loaded = load_backbone(out, heads=2, format=format)
    assert torch.allclose(loaded(images), load_backbone(weights)(images), atol=1e-5)
    assert main(["export", str(weights), str(out), "--format", format]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(weights), str(out), "--format", format, "--overwrite"]) == 0
    if format == "huggingface":
        assert load_backbone(out).provenance.mean == (0.1, 0.2, 0.3)


def test_mistakes_are_a_sentence_and_exit_code_2(weights, tmp_path, capsys):
    for arguments, said in (
        (["inspect-weights", str(tmp_path / "none.pth")], "none.pth does not exist"),
        (["inspect-weights", str(weights), "--image-size", "33"], "no whole number of patches"),
        (
            ["inspect-weights", str(weights), "--image-size", "8", "8", "8"],
            "takes one number or height and width",
        ),
        (["export", str(weights), str(tmp_path / "a.npz"), "--format", "timm"], "must end in .pth"),
    ):
        assert main(arguments) == 2
        said_on_stderr = capsys.readouterr().err
        assert said in said_on_stderr
        assert "Traceback" not in said_on_stderr
    with pytest.raises(ValueError, match="does not exist"):
        main(["--traceback", "inspect-weights", str(tmp_path / "none.pth")])


def test_ambiguous_sources_are_read_as_told(tmp_path, capsys):
    torch.save(timm_vit(num_classes=0).model.state_dict(), tmp_path / "a.pth")
    for format, mode in (("reference", "dino"), ("timm", "timm")):
        main(
            ["inspect-weights", str(tmp_path / "a.pth"), "--heads", "2", "--source-format", format, "--json"]
        )
        assert json.loads(capsys.readouterr().out)["position_mode"] == mode


def test_config_prints_settings_that_load_back(tmp_path, capsys):
    settings = ["data.source=my photos", "optim.lr=1e-3", "budget.steps=100", "init.weights=a.pth"]
    assert main(["config", "pretrain", *settings]) == 0
    printed = capsys.readouterr().out
    assert "# peak learning rate" in printed
    (tmp_path / "a.yaml").write_text(printed)
    assert load(PretrainConfig, tmp_path / "a.yaml") == load(PretrainConfig, None, settings)
    assert main(["config", "pretrain", "--config", str(tmp_path / "a.yaml")]) == 0
    assert capsys.readouterr().out == printed


def test_config_prints_a_json_schema(capsys):
    assert main(["config", "pretrain", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["properties"]["seed"]["default"] == 0


def test_bad_settings_are_explained_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from dino_vit.cli import main; code = main(sys.argv[1:]);"
        "print(code, 'torch' in sys.modules)"
    )
    settings = ["loss.teacher_temp=0.3", "optim.learning_rate=0.05", "model.patch_size=15"]
    command = [sys.executable, "-c", code, "pretrain", f"output={tmp_path / 'run'}", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 False"
    assert "4 settings are wrong" in done.stderr
    assert "loss.teacher_temp=0.3 is not below loss.student_temp=0.1" in done.stderr
    assert "optim.learning_rate is not a setting (command line); did you mean optim.lr?" in done.stderr
    assert "views.global_size=224 does not divide into patches of 15; take 210 or 225" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["data.source=/no/such/folder"],
            "'/no/such/folder' does not exist: give a folder of images",
        ),
        (["run.trackers=[tensorbord]"], "Accelerate knows no tensorbord; it knows aim, "),
        (["data.source=synthetic:20"], "no step in an epoch: 20 images do not fill a global batch of 64"),
        (["init.weights=/no/such.pth", *SMALL], "/no/such.pth does not exist"),
    ],
)
def test_what_pretrain_cannot_do_is_a_sentence_and_exit_code_2(tmp_path, capsys, settings, said):
    assert main(["pretrain", f"output={tmp_path / 'run'}", *settings]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_output_that_cannot_be_written_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    settings = ["budget.epochs=20", *SMALL]
    assert main(["pretrain", f"output={tmp_path / 'file' / 'run'}", *settings]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert str(tmp_path / "file") in said
