"""Train on video clips: TorchCodec decodes the frames, gl.Augment gives each clip one crop, one flip, one jitter.

    python examples/video.py
    python examples/video.py PATH --epochs 10    PATH/CLASS/….mp4, all of the same size

This example needs FFmpeg, and `pip install torchcodec`. Without PATH it writes videos of pictures that move fast,
slowly or not at all. So the crop has to be the same in all frames of a clip, or there is nothing to learn.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import small
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gpuload as gl
from gpuload import transforms as T

FRAMES = 8  # per clip
SPEEDS = {"fast": 8, "slow": 2, "still": 0}  # pixels per frame


class Clips(Dataset):
    """A random clip from each video, uint8 T×C×H×W, and its label."""

    def __init__(self, root: Path) -> None:
        self.classes = sorted(path.name for path in root.iterdir())
        self.paths = sorted(root.glob("*/*.mp4"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from torchcodec.decoders import VideoDecoder
        from torchcodec.samplers import clips_at_random_indices

        path = self.paths[index]
        clips = clips_at_random_indices(VideoDecoder(path), num_clips=1, num_frames_per_clip=FRAMES)
        return clips.data[0], self.classes.index(path.parent.name)


def videos(root: Path, count: int = 48) -> None:
    """Write videos of 24 frames to CLASS/….mp4."""
    from torchcodec.encoders import VideoEncoder

    for number in range(count):
        name, speed = list(SPEEDS.items())[number % len(SPEEDS)]
        picture = np.array(small.scene(number)[0])
        frames = np.stack([np.roll(picture, speed * time, axis=1) for time in range(24)])
        (root / name).mkdir(exist_ok=True)
        encoder = VideoEncoder(torch.from_numpy(frames).movedim(-1, 1).contiguous(), frame_rate=12)
        encoder.to_file(root / name / f"{number}.mp4")


class Network(nn.Module):
    """Convolutions over the differences between frames."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv3d(16, 32, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        """Return scores N×classes for clips N×T×C×H×W."""
        changes = clips.diff(dim=1).movedim(1, 2)  # N×C×T×H×W
        return self.head(self.body(changes).mean((2, 3, 4)))


def missing() -> str | None:
    """Return the reason why videos cannot be decoded here, or None."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # TorchCodec, or a library that it loads, is missing
        return str(error).partition("\n")[0]
    return None


def main() -> None:
    parser = small.parser(__doc__)
    parser.set_defaults(epochs=8, batch_size=8)
    if (why := missing()) is not None:
        print(f"nothing to do without TorchCodec and FFmpeg ({why}): apt-get install ffmpeg, pip install torchcodec")
        return
    args = small.arguments(parser, videos)
    data = Clips(args.data)
    device: Any = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    augment = gl.Augment(
        [
            T.RandomResizedCrop(args.size, scale=(0.5, 1)),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.3, 0.3, 0.3),
            T.Normalize(mean=(0.43, 0.39, 0.38), std=(0.23, 0.22, 0.22)),
        ],
        device=device,
    )
    loader = DataLoader(
        data,
        args.batch_size,
        shuffle=True,
        num_workers=args.workers or 0,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),
    )
    torch.manual_seed(0)
    model = Network(len(data.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        losses, correct = [], torch.zeros((), device=device)
        for clips, labels in loader:
            clips, labels = augment(clips), labels.to(device)  # float32 N×T×3×size×size
            scores = model(clips)
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            correct += (scores.argmax(1) == labels).sum()
        accuracy = correct.item() / len(data)
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
