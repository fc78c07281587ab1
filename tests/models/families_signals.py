"""Speech, images, and images with words."""

import torch
from families import SIZES, WORDS, Family, hugging, images, timm, vectors
from inputs import library

pixels = lambda call, x: call(pixel_values=x).logits


def speech():
    """Convolutions over the wave, positions by a convolution with weight norm; no time steps are masked."""
    options = {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2}
    options |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    options |= {"layerdrop": 0.0, "apply_spec_augment": False, "vocab_size": 8, **SIZES}
    return hugging("Wav2Vec2", "Wav2Vec2ForCTC", lambda call, x: call(x).logits, vectors(64), True, **options)


def clip():
    sizes = {**SIZES, "projection_dim": 8}
    text = {**sizes, **WORDS, "max_position_embeddings": 8}
    options = {"text_config": text, "vision_config": {**sizes, "image_size": 16, "patch_size": 8}, "projection_dim": 8}

    def matched(call, x):
        ids = torch.arange(3, 9).expand(4, 6) + torch.arange(4)[:, None]
        return call(input_ids=ids, pixel_values=x).logits_per_image

    return hugging("CLIP", "CLIPModel", matched, images(), **options)


def vit():
    options = {"image_size": 16, "patch_size": 8, "num_labels": 4, "hidden_dropout_prob": 0.1}
    return hugging("ViT", "ViTForImageClassification", pixels, images(), True, **options, **SIZES)


def mlp_mixer():
    models = library("timm").models
    make = lambda: models.MlpMixer(num_classes=4, img_size=16, patch_size=8, embed_dim=16, num_blocks=2)
    return Family(make, images(16))


SIGNALS = {
    "wav2vec2": speech,
    "clip": clip,
    "vit": vit,
    "efficientnet": lambda: timm("test_efficientnet", draws=True, drop_rate=0.1, drop_path_rate=0.1),
    "nfnet": lambda: timm("test_nfnet"),
    "vit_of_timm": lambda: timm("test_vit")._replace(inside=torch.float32),  # positions
    "mobilenet": lambda: timm("mobilenetv3_small_050", drop_rate=0.0),
    "mlp_mixer": mlp_mixer,
    "convnext": lambda: timm("test_convnext2", draws=True, drop_path_rate=0.1),
}
