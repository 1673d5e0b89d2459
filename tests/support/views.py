"""The views of a configuration, what is drawn for their samples, and the distance of two distributions."""

import numpy as np
import torch

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.views.augment import draw_augment
from dino_vit.views.build import build_views
from dino_vit.views.geometry import choose_boxes, draw_box_numbers


def views_of(*overrides):
    return build_views(load(PretrainConfig, None, list(overrides)))


def draw_boxes(views, *, seed, epoch, sample, height, width):
    box_draws = draw_box_numbers(views, seed=seed, epoch=epoch, samples=np.array([sample]))
    return choose_boxes(views, box_draws[0], height=height, width=width)


def draw_rows(views, *, samples, seed=0, epoch=0):
    """Return photometric rows, (samples, views, columns)."""
    augment = [view.augment for view in views]
    return torch.from_numpy(draw_augment(augment, seed=seed, epoch=epoch, samples=np.asarray(samples)))


def ks_distance(a, b):
    """Return the statistic of the Kolmogorov-Smirnov test."""
    points = np.concatenate([a, b])
    a, b = np.sort(a), np.sort(b)
    return abs(
        np.searchsorted(a, points, "right") / len(a) - np.searchsorted(b, points, "right") / len(b)
    ).max()
