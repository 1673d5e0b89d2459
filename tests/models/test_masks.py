import torch

from dino_vit.models.masks import Masks


def test_places_and_weights():
    hidden = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    masks = Masks.of(hidden)
    assert masks.places.tolist() == [0, 2, 7]
    assert masks.weights.tolist() == [0.5, 0.5, 1.0]
    padded = masks.padded(5)
    assert padded.places.tolist() == [0, 2, 7, 0, 0]
    assert padded.masked == masks.masked == 3
