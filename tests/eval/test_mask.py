"""The mask of an object: a cut of patches in two, and the colours of both parts."""

import numpy as np
import pytest
import torch

from dino_vit.eval import mask
from dino_vit.eval.mask import MOST, NOISE, ROUNDS, cut, object_mask


def square():
    truth = torch.zeros(7, 9, dtype=torch.bool)
    truth[2:6, 3:7] = True
    noise = torch.randn(7, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    tokens = torch.where(truth[..., None], torch.eye(16)[0], torch.eye(16)[1]) + 0.1 * noise
    return truth, tokens, noise


def larger(patches, times):
    return patches.repeat_interleave(times, 0).repeat_interleave(times, 1)


def naive_cut(tokens):
    """Return the second eigenvector of (D - W) v = λ D v, patch by patch."""
    units = [token / np.linalg.norm(token) for token in tokens.reshape(-1, tokens.shape[-1])]
    cosines = np.array([[one @ other for other in units] for one in units])
    weights = np.exp(7 * (cosines - 1) / cosines.std()) + 1e-5
    degrees = weights.sum(axis=1)
    values, vectors = np.linalg.eig((np.diag(degrees) - weights) / degrees[:, None])
    second = vectors[:, np.argsort(values.real)[1]].real
    return (second > second.mean()).reshape(tokens.shape[:2])


def naive_mask(marked, picture, patch):
    """Return a mask by the colours of both of its parts, pixel by pixel."""
    pixels = picture.transpose(1, 2, 0).astype(float)
    height, width = marked.shape
    for _ in range(ROUNDS):
        says = 0.0
        for part, sign in ((marked, 1), (~marked, -1)):
            apart = pixels - pixels[part].mean(axis=0)
            spread = np.cov(pixels[part].T, bias=True) + NOISE * np.eye(3)
            squares = np.einsum("yxc,cd,yxd->yx", apart, np.linalg.inv(spread), apart)
            says = says - sign * (squares + np.log(np.linalg.det(spread))) / 2
        says, around = says.clip(-MOST, MOST), patch // 2
        windows = [
            [
                says[max(0, y - around) : y + around + 1, max(0, x - around) : x + around + 1].mean()
                for x in range(width)
            ]
            for y in range(height)
        ]
        marked = np.array(windows) > 0
    return marked


def test_the_cut_is_the_second_eigenvector():
    truth, tokens, noise = square()
    found = cut(tokens)
    assert torch.equal(found, truth) or torch.equal(found, ~truth)
    noisy = tokens + 0.3 * noise
    found, expected = cut(noisy).numpy(), naive_cut(noisy.numpy())
    assert np.array_equal(found, expected) or np.array_equal(found, ~expected)
    found, large = cut(larger(tokens, 8)), larger(truth, 8)  # cut after patches are joined
    share = (found == large).double().mean()
    assert max(share, 1 - share) > 0.9


def coloured(truth, generator):
    colours = torch.where(truth, torch.tensor([180, 150, 60])[:, None, None], 90)
    noise = 20 * torch.randn(colours.shape, generator=generator)
    return (colours + noise).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("turned", [False, True])
def test_the_mask_follows_the_outline_that_colours_have(turned, monkeypatch):
    """Whichever part the cut marks: the sign of an eigenvector is any."""
    _, tokens, _ = square()
    monkeypatch.setattr(mask, "cut", lambda tokens: cut(tokens) ^ turned)
    rows, columns = torch.meshgrid(torch.arange(56), torch.arange(72), indexing="ij")
    disc = (rows - 32) ** 2 + (columns - 40) ** 2 < 18**2  # patches that are cut by its outline
    picture = coloured(disc, torch.Generator().manual_seed(1))
    wrong = (object_mask(tokens, picture, (8, 8)) != disc).double().mean()
    by_patches = (larger(cut(tokens), 8) != disc).double().mean()
    assert wrong < min(by_patches, 1 - by_patches) / 3


def test_the_mask_is_that_of_each_pixel_by_itself():
    _, tokens, _ = square()
    picture = torch.randint(256, (3, 35, 45), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    picture[:, 8:30, 12:40] //= 2
    found = object_mask(tokens, picture, (5, 5)).numpy()
    expected = naive_mask(larger(cut(tokens), 5).numpy(), picture.numpy(), 5)
    assert 0.1 < expected.mean() < 0.9, "there are two parts"
    assert np.array_equal(found, expected) or np.array_equal(found, ~expected)


@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("colour", [0, 255])
def test_there_may_be_nothing_to_tell_apart(side, colour):
    picture = torch.full((3, 4 * side, 4 * side), colour, dtype=torch.uint8)
    assert object_mask(torch.ones(side, side, 4), picture, (4, 4)).shape == picture.shape[1:]
