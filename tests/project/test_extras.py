"""What an extra installs, and what a command says where it is not installed."""

import sys

import pytest
from packaging.requirements import Requirement

from dino_vit import export_backbone, vit_tiny
from dino_vit.cli import main
from tests.support.documents import PROJECT, ROOT, quoted, rows
from tests.support.image_sets import FILES, NAMES, write_folder

PACKAGES = {
    extra: {Requirement(wanted).name for wanted in requirements}
    for extra, requirements in PROJECT["optional-dependencies"].items()
}
OWN = {"dev", "docs", "peers"}  # of those who work on the library


def test_the_install_page_lists_every_extra_and_its_packages():
    table = rows((ROOT / "docs/start/install.md").read_text())
    listed = {quoted(extra)[0]: set(quoted(packages)) for extra, packages, _ in table}
    assert listed == {extra: names for extra, names in PACKAGES.items() if extra not in OWN}


@pytest.mark.parametrize(
    ("missing", "arguments", "packages"),
    [
        ("datasets", ["inspect-data", "hf:owner/name"], "datasets"),
        ("timm", ["pretrain", "photos", "model.arch=timm:resnet18", "data.batch_size=2"], "timm"),
        ("onnxruntime", ["export", "vit.pth", "vit.onnx", "--format", "onnx"], "onnxruntime onnxscript"),
    ],
)
def test_a_command_says_what_to_install(missing, arguments, packages, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos", {f"{number}.png": FILES[NAMES[0]] for number in range(4)})
    export_backbone(vit_tiny(image_size=32, patch_size=16, depth=1), "vit.pth", "reference")
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith(f": pip install {packages}\n")
