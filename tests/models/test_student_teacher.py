import torch

from dino_vit.models.student_teacher import Masks


def test_indices_and_weights_of_masks():
    masks = Masks.of(torch.tensor([[True, False, True], [False, False, False], [False, True, False]]))
    assert masks.mask_indices.tolist() == [0, 2, 7]
    assert masks.weights.tolist() == [0.5, 0.5, 1.0]
