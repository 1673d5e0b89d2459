"""Terms of the loss as a test needs them."""

from dino_vit.method.objective import Sizes
from dino_vit.method.targets import Center
from dino_vit.method.terms.cls import Cls


def sizes_of(views: int = 2, global_views: int = 2) -> Sizes:
    return Sizes(views=views, global_views=global_views, size=(32, 32), grid=(2, 2))


def cls_term(views: int = 2, global_views: int = 2) -> Cls:
    return Cls(1.0, sizes_of(views, global_views), Center(prototypes=1), 0.1)
