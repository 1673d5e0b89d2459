"""Show what a backbone attends to in each frame of a video, beside the frame.

    python examples/attention_video.py clip.mp4 runs/photos attention.mp4

It needs PyAV (`pip install av`). The overlay is the mean attention of the heads of the last block.
"""

import argparse

import av
import torch

import dino_vit
from dino_vit.eval.attention import cls_attention, whole_image
from dino_vit.views.pictures import as_picture, overlay, side_by_side

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("video")
parser.add_argument("weights", help="run or file of weights")
parser.add_argument("output", help="file to write, .mp4")
options = parser.parse_args()
backbone = dino_vit.load_backbone(options.weights)
shorter = 2 * min(backbone.image_size)  # positions are interpolated to it

with av.open(options.video) as reader, av.open(options.output, "w") as writer:
    rate, stream = reader.streams.video[0].average_rate, None
    for frame in reader.decode(video=0):
        pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
        upright = pixels.rot90(frame.rotation // 90, (1, 2))  # as the phone was held
        image = backbone.transform.pixels.conform(upright)
        picture, padded = whole_image(backbone, image, backbone.transform, shorter=shorter, longest=1024)
        picture, attention = as_picture(picture), cls_attention(backbone, padded)[0].mean(0)
        joined = side_by_side([picture, overlay(picture, attention, backbone.patch_size)]).permute(1, 2, 0)
        if stream is None:
            stream = writer.add_stream("libx264", rate=rate, options={"crf": "18"})  # which needs even sides
            stream.height, stream.width = (side // 2 * 2 for side in joined.shape[:2])
            stream.pix_fmt = "yuv420p"
        even = joined[: stream.height, : stream.width].contiguous().numpy()
        writer.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
    if stream:
        writer.mux(stream.encode(None))
