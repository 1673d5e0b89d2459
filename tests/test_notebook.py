"""In a notebook: cells run as a user would run them, and the bars are drawn in their outputs."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.support.runs import SETTINGS


def execute(folder, *cells):
    """Run cells in a kernel of their own, and return the outputs of each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def html(outputs):
    return [one["data"]["text/html"] for one in outputs if one.get("data", {}).get("text/html")]


def stderr(outputs):
    return "".join(one["text"] for one in outputs if one.get("name") == "stderr")


def test_a_user_pretrains_looks_and_embeds(tmp_path):
    ran, shown, quiet, found = execute(
        tmp_path,
        f"import dino_vit\nrun = dino_vit.pretrain(output='run', **{SETTINGS!r})",
        "run",
        f"again = dino_vit.pretrain(output='again', verbose=False, **{SETTINGS!r})",
        "dino_vit.knn('synthetic:60:16', weights='run', k=3)",
    )
    (bar,) = html(ran)
    text = re.sub("<[^>]+>", "", bar)
    assert "20/20" in text
    assert "100%" in text
    assert "loss" in text
    assert "step  5/20" not in stderr(ran), "lines beside the bar"
    assert "done: run/checkpoints holds the last step" in stderr(ran)
    assert "step 20 of 20" in shown[0]["data"]["text/plain"]
    assert quiet == []
    assert "60 images of synthetic:60:16 by their neighbours" in "".join(one.get("text", "") for one in found)
    assert found[-1]["data"]["text/plain"].startswith("Classification(top1=Accuracy(percent=")


def test_a_mistake_is_an_exception_with_a_sentence(tmp_path):
    with pytest.raises(CellExecutionError, match=r"epochs is not a setting .in code.; did you mean budget"):
        execute(tmp_path, "import dino_vit\ndino_vit.pretrain(epochs=3)")


def test_long_work_has_a_bar_that_goes(tmp_path):
    (outputs,) = execute(
        tmp_path,
        "import logging, time\n"
        "from dino_vit.core import log, progress\n"
        "progress.PATIENCE = 0\n"
        "log.setLevel(logging.INFO)\n"
        "with progress.progress('Reading', 10) as advance:\n"
        "    for _ in range(5):\n"
        "        time.sleep(0.21)\n"
        "        advance(1)\n"
        "    bar = advance.bar.live\n"
        "    shown = bar.handle is not None\n"
        "assert shown\n",
    )
    assert html(outputs) == []
