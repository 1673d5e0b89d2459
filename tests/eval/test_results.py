import json

import pytest

from dino_vit.eval.results import results_path, write_results


def test_results_lie_with_the_weights_unless_told(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert results_path("linear", weights=str(run)) == run / "eval" / "linear.json"
    checkpoint = run / "checkpoints" / "step-00000005.safetensors"
    assert results_path("knn", weights=str(checkpoint)) == run / "eval" / "step-00000005.knn.json"
    assert results_path("knn", weights=str(tmp_path / "dino.pth")) == tmp_path / "dino.knn.json"
    told = results_path("knn", weights=str(run), output="here.json")
    assert str(told) == "here.json"


def test_results_are_whole_or_not_there(tmp_path):
    path = tmp_path / "new" / "x.json"
    write_results(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]
