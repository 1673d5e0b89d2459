import json
import math

import pytest
import torch

from dino_vit.eval.accuracy import accuracy, per_class_accuracy, results_path, top_k_accuracy, write_results


@pytest.mark.parametrize(("correct", "count"), [(0, 1), (1, 1), (0, 7), (3, 7), (81, 263), (49_999, 50_000)])
def test_the_ends_of_the_interval_are_where_the_score_test_turns(correct, count):
    """Wilson's bounds solve |share - p| = 1.96 * sqrt(p (1 - p) / count) for p: found here by bisection."""

    def excess(p):
        return abs(correct / count - p) - 1.959963984540054 * math.sqrt(p * (1 - p) / count)

    def root(outside, inside):
        for _ in range(200):
            middle = (outside + inside) / 2
            outside, inside = (middle, inside) if excess(middle) > 0 else (outside, middle)
        return inside

    found, share = accuracy(correct, count), correct / count
    assert found.low == pytest.approx(100 * root(0.0, share) if correct else 0.0, abs=1e-7)
    assert found.high == pytest.approx(100 * root(1.0, share) if correct < count else 100.0, abs=1e-7)


def test_accuracy_counts_what_a_loop_counts():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 6, generator=generator)
    values = torch.tensor([-3, 0, 5, 7, 100, 9])  # labels have gaps and signs
    labels = values[torch.randint(5, (40,), generator=generator)]
    ranked = values[scores.argsort(dim=1, descending=True)]
    for k in (1, 2, 5):
        right = sum(label in row[:k] for row, label in zip(ranked.tolist(), labels.tolist(), strict=True))
        found = top_k_accuracy(ranked, labels, k)
        assert (found.correct, found.images) == (right, 40)
        assert found.percent == pytest.approx(100 * right / 40)
        assert 0 <= found.low < found.percent < found.high <= 100
    classes = per_class_accuracy(ranked, labels)
    assert set(classes) == set(labels.tolist())
    for label, found in classes.items():
        chosen = [row[0] for row, true in zip(ranked.tolist(), labels.tolist(), strict=True) if true == label]
        assert (found.correct, found.images) == (chosen.count(label), len(chosen))


def test_accuracy_of_no_image_is_nan():
    nothing = accuracy(0, 0)
    assert math.isnan(nothing.percent)
    assert (nothing.low, nothing.high) == (0, 100)


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
