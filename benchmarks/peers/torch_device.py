"""torch DataLoader whose workers decode, crop and flip; what makes floats of uint8 runs on the device, on a batch.

`variant`: ``"torchvision"``, its v2 transforms, of which ColorJitter draws once for a batch; or ``"kornia"``, its
`AugmentationSequential`, which draws for each image. Both run on the consumer's stream, as training scripts have it.
"""

from __future__ import annotations

import PIL
import torch

from benchmarks.peers import torch_loader
from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe, main
from benchmarks.peers.torchvision_import import torchvision, v2


def build(recipe: Recipe) -> Peer:
    versions, strengths = {"pillow": PIL.__version__}, [recipe.jitter] * 3
    if recipe.variant == "kornia":
        import kornia
        import kornia.augmentation as K

        steps = [
            *([K.ColorJitter(recipe.jitter, recipe.jitter, recipe.jitter)] if recipe.jitter else []),
            K.Normalize(MEAN, STD),
        ]
        sequential = K.AugmentationSequential(*steps, data_keys=["input"]).to(recipe.device)
        versions["kornia"] = kornia.__version__

        @torch.no_grad()
        def finish(images: torch.Tensor) -> torch.Tensor:
            return sequential(images.to(torch.float32).div_(255))  # pyright: ignore[reportReturnType]
    else:
        finish = v2.Compose(
            [
                *([v2.ColorJitter(*strengths)] if recipe.jitter else []),
                v2.ToDtype(getattr(torch, recipe.dtype), scale=True),
                v2.Normalize(MEAN, STD, inplace=True),
            ]
        )
    load = torchvision.datasets.folder.pil_loader
    return torch_loader.build(recipe, load, [v2.PILToTensor()], versions, on_device=finish)


if __name__ == "__main__":
    main(build)
