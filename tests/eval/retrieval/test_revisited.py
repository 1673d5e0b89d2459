import os
import pickle

import numpy as np
import pytest
import torch

from dino_vit.eval.retrieval.ranking import ranks_of
from dino_vit.eval.retrieval.revisited import judge_difficulty, read_ground_truth

GROUND_TRUTH = {
    "imlist": [f"image_{number}" for number in range(6)],
    "qimlist": ["query_a", "query_b"],
    "gnd": [
        {"bbx": [1.0, 2.0, 30.0, 20.5], "easy": [0], "hard": np.array([2, 3]), "junk": [4]},
        {"bbx": np.array([0, 0, 9, 9.0]), "easy": np.array([], int), "hard": [5], "junk": []},
    ],
}


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_the_published_form_is_read(tmp_path, protocol):
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps(GROUND_TRUTH, protocol))
    found = read_ground_truth(path)
    assert found.images == GROUND_TRUTH["imlist"]
    first, second = found.queries
    assert (first.name, first.box, first.hard.tolist()) == ("query_a", (1, 2, 30, 20.5), [2, 3])
    assert (second.box, second.easy.tolist(), second.hard.tolist()) == ((0, 0, 9, 9), [], [5])


class Malicious:
    def __init__(self, function, argument):
        self.made_by = function, (argument,)

    def __reduce__(self):
        return self.made_by


@pytest.mark.parametrize("function", [os.mkdir, eval, pickle.loads])
def test_a_pickle_that_would_run_something_is_refused(tmp_path, function):
    made = tmp_path / "made"
    argument = {os.mkdir: str(made), eval: f"__import__('os').mkdir({str(made)!r})"}.get(
        function, pickle.dumps(Malicious(os.mkdir, str(made)))
    )
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps({**GROUND_TRUTH, "gnd": Malicious(function, argument)}))
    with pytest.raises(ValueError, match=r"it asks for .*, which is neither a number nor a list"):
        read_ground_truth(path)
    assert not made.exists()


def test_what_is_no_ground_truth_is_said(tmp_path):
    path = tmp_path / "gnd.pkl"
    of_other_images = {**GROUND_TRUTH, "imlist": ["image_0"]}
    for data, said in (
        (b"", "no ground truth"),
        (pickle.dumps([1]), "no ground truth"),
        (pickle.dumps(GROUND_TRUTH)[:-20], "no ground truth"),
        (pickle.dumps(of_other_images), "query_a has images that are not listed"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=said):
            read_ground_truth(path)


def test_each_difficulty_leaves_out_what_the_protocol_says(tmp_path):
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps(GROUND_TRUTH))
    truth = read_ground_truth(path)
    # Query a ranks 1 (wrong), 4 (junk), 2 (hard), 0 (easy), 5 (wrong), 3 (hard); query b the other way round.
    order = [1, 4, 2, 0, 5, 3]
    cosines = torch.zeros(2, 6, dtype=torch.double)
    cosines[0, order] = torch.arange(6, 0, -1).double()
    cosines[1, order] = torch.arange(1, 7).double()
    inf = torch.inf
    for difficulty, ranks in (
        ("easy", [[2], [inf]]),
        ("medium", [[2, 3, 5], [2, inf, inf]]),
        ("hard", [[2, 4], [2, inf]]),
    ):
        relevant, junk = judge_difficulty(truth.queries, 6, difficulty)(slice(0, 2))
        found = ranks_of(cosines.clone(), relevant, junk)
        assert found.values.tolist() == ranks, difficulty
        assert bool(found.average_precision()[1].isnan()) == (difficulty == "easy")
