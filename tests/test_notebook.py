"""In a notebook: cells run as a user would run them."""

import nbformat
from nbclient import NotebookClient

from tests.support.runs import SETTINGS


def execute(folder, *cells):
    """Run cells in a kernel of their own, and return the outputs of each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def stderr(outputs):
    return "".join(one["text"] for one in outputs if one.get("name") == "stderr")


def test_a_user_pretrains_looks_and_embeds(tmp_path):
    ran, shown, found, returned, sheet = execute(
        tmp_path,
        f"import dino_vit\nrun = dino_vit.pretrain(output='run', **{SETTINGS!r})",
        "run",
        "dino_vit.knn('synthetic:60:16', weights='run', k=3)",
        "dino_vit.knn('synthetic:60:16', run, k=3, verbose=False)",
        "dino_vit.attention('synthetic:3:32', run, count=2, verbose=False).sheets[0]",
    )
    assert "step  5/20" in stderr(ran), "lines, not a bar"
    assert "saved: run/checkpoints holds the last step" in stderr(ran)
    assert "step 20 of 20" in shown[0]["data"]["text/plain"]
    assert "<pre>run: ViT" in shown[0]["data"]["text/html"]
    said = "Accuracy (%), leave-one-out, on 60 images of synthetic:60:16"
    assert said not in "".join(one.get("text", "") for one in found), "the result shows it, once"
    for table in (found[-1], *returned):
        assert table["data"]["text/plain"].startswith(said)
        assert table["data"]["text/html"].startswith(f"<pre>{said}")
    assert "image/png" in sheet[-1]["data"]
