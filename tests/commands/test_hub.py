"""An export is pushed to a server that speaks the hub's protocol: real requests, real processes."""

import os
import re
import subprocess
import sys

import pytest
from huggingface_hub import constants

import dino_vit
from dino_vit import save_backbone
from dino_vit.cli import main
from tests.support.backbones import backbone
from tests.support.hub import serving

# Said by the HTTP library to the hub's library, of how it sends a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_of_a_test"
NAME = "someone/vit-photos"


@pytest.fixture
def weights(tmp_path):
    save_backbone(backbone(), tmp_path / "mine.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "mine.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server in place of the hub, for this process."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server


def push(weights, out, **settings):
    return dino_vit.export(weights, out, format="huggingface", push=NAME, verbose=False, **settings)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_sends_the_folder_in_one_commit(weights, tmp_path):
    with serving() as hub:
        environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}
        options = ["--format", "huggingface", "--push", NAME, "--license", "apache-2.0"]
        done = subprocess.run(
            [sys.executable, "-m", "dino_vit", "export", weights, "out", *options],
            cwd=tmp_path,
            env={**os.environ, **environ, "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert hub.commits == [contents(tmp_path / "out")]
        assert hub.commits[0].keys() == {
            *("README.md", "config.json", "model.safetensors", "preprocessor_config.json")
        }
        assert hub.repositories == {NAME: False}
        asked = {request.path: request.token for request in hub.requests if request.method == "POST"}
        assert len(asked) == 5
        assert set(asked.values()) == {TOKEN}
    *lines, last = done.stdout.splitlines()
    assert lines[1] == "model = AutoModel.from_pretrained('out', add_pooling_layer=False)"
    assert last == f"# pushed to {hub.url}/{NAME}"
    assert f"out: pushing to {hub.url}/{NAME}" in done.stderr
    card = hub.commits[0]["README.md"].decode()
    assert f"AutoModel.from_pretrained('{NAME}', add_pooling_layer=False)" in card
    assert "license: apache-2.0\n" in card


def test_the_function_returns_the_address_and_is_silent(hub, weights, tmp_path, capfd):
    export = push(weights, tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    assert export.url == f"{hub.url}/{NAME}"
    again = push(weights, tmp_path / "out", overwrite=True, license="mit")
    assert again.url == export.url
    assert [commit["README.md"].decode().count("license: mit") for commit in hub.commits] == [0, 1]


def test_a_private_repository_is_private_or_nothing_is_sent(hub, weights, tmp_path):
    push(weights, tmp_path / "a", private=True)
    assert hub.repositories == {NAME: True}
    push(weights, tmp_path / "b", private=True)
    hub.repositories[NAME] = False
    with pytest.raises(ValueError, match="it exists and is public; leave out --private"):
        push(weights, tmp_path / "c", private=True)
    assert len(hub.commits) == 2


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("create", 401, "the token is not valid; run `hf auth login`, or set HF_TOKEN (what it says)"),
        ("create", 403, "the token may not write there; use one with write access (what it says)"),
        ("commit", 400, "the server answered 400 (what it says)"),
    ],
)
def test_what_the_server_refuses_is_a_sentence_and_the_folder_stays(
    hub, weights, tmp_path, capsys, monkeypatch, path, status, reason
):
    monkeypatch.chdir(tmp_path)
    hub.refuse(path, status, "what it says")
    command = ["export", str(weights), "out", "--format", "huggingface", "--push", NAME]
    assert main(command) == 2
    *_, said = capsys.readouterr().err.splitlines()
    beginning = f"dino-vit export: out is exported, but was not pushed to {hub.url}/{NAME}: {reason}"
    assert said.startswith(beginning)
    assert said.endswith("To try again, repeat the command with --overwrite")
    assert len(contents(tmp_path / "out")) == 4
    assert hub.commits == []


def test_what_is_missing_is_said_before_anything_is_written(hub, weights, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(
        ValueError, match="needs a token with write access: run `hf auth login`, or set HF_TOKEN"
    ):
        push(weights, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as where it is not installed
    with pytest.raises(ValueError, match=re.escape("pip install 'dino-vit[hub]'")):
        push(weights, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert hub.requests == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"push": "photos"}, "push=photos is not a repository; write OWNER/NAME"),
        ({"push": "a/b--c"}, "Cannot have -- or .."),
        ({"push": NAME, "format": "timm"}, "--push is for --format huggingface, not timm"),
        ({"private": True}, "--private is for --push OWNER/NAME"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(hub, weights, tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dino_vit.export(weights, tmp_path / "out", **{"format": "huggingface", **settings})
    assert not (tmp_path / "out").exists()
