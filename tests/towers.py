"""Vision-language models with random weights, by family, as folders: see `folder_of`."""

import copy
import functools
import importlib.util
import json

import torch
import transformers
from toys import tiny

# A CPU's PyTorch lacks what torchvision registers when it is imported; to resize needs none of it.
TORCHVISION = importlib.util.find_spec("torchvision") is not None
if TORCHVISION and not torch.version.cuda:
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil  # noqa: E402
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil  # noqa: E402
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
              image_size=32, patch_size=8, initializer_range=0.3)
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
         "<row_1_col_1>", "<begin>", "<end>"]


def llava(tokenizer, size):
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(do_resize=False, do_center_crop=False), tokenizer, patch_size=8,
        vision_feature_select_strategy="full")
    config = transformers.LlavaConfig(
        text_config=dict(model_type="llama", **size),
        vision_config=dict(model_type="siglip_vision_model", **VISION),
        image_token_id=processor.image_token_id, vision_feature_select_strategy="full",
        vision_feature_layer=-1)
    return transformers.LlavaForConditionalGeneration(config), processor


def idefics3(tokenizer, size, vision=VISION, scale=2):
    edge = dict(longest_edge=vision["image_size"])
    processor = transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(do_image_splitting=False, do_resize=False, size=edge,
                                  max_image_size=edge), tokenizer, image_seq_len=4)
    config = transformers.Idefics3Config(
        text_config=dict(model_type="llama", pad_token_id=0, **size), vision_config=vision,
        image_token_id=processor.image_token_id, scale_factor=scale, pad_token_id=0)
    return transformers.Idefics3ForConditionalGeneration(config), processor


def gemma3(tokenizer, size):
    processor = transformers.Gemma3Processor(Gemma3ImageProcessorPil(do_resize=False), tokenizer,
                                             image_seq_length=4)
    config = transformers.Gemma3Config(
        text_config=dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=24,
                         layer_types=["sliding_attention", "full_attention"] * 2, **size),
        vision_config=VISION, mm_tokens_per_image=4, image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id, eoi_token_id=tokenizer.eoi_token_id)
    return transformers.Gemma3ForConditionalGeneration(config), processor


def qwen2_5_vl(tokenizer, size):
    """Half of its layers see windows of 32 pixels."""
    return qwen("Qwen2_5_VL", tokenizer, size, dict(fullatt_block_indexes=[1], window_size=32))


def qwen3_vl(tokenizer, size):
    """The first layer of its tower feeds the first of its decoder."""
    return qwen("Qwen3VL", tokenizer, size | dict(head_dim=8), dict(
        deepstack_visual_indexes=[0], num_position_embeddings=64))


def qwen3_5(tokenizer, size):
    """Two of its four layers keep states (more/hybrid.py)."""
    linear = {f"linear_{of}": number for of, number in (
        ("key_head_dim", 8), ("value_head_dim", 8), ("num_key_heads", 2), ("num_value_heads", 4))}
    linear["layer_types"] = ["linear_attention", "full_attention"] * 2
    linear["initializer_range"] = 0.2  # of larger weights a recurrence magnifies the rounding
    return qwen("Qwen3_5", tokenizer, size | linear | dict(head_dim=16),
                dict(num_position_embeddings=64), "Qwen3VL")


def qwen(name, tokenizer, size, vision, processor=""):
    """A model whose positions have three dimensions, and what its folder has for images: as those
    on the Hub nothing but the image processor's file, which names the processor."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1],
                partial_rotary_factor=8 / size.get("head_dim", 8))
    images = Qwen2VLImageProcessorPil(patch_size=8, size=dict(shortest_edge=256,
                                                              longest_edge=10**6))
    images._processor_class = f"{processor or name}Processor"
    marks = {f"{mark}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>")
             for mark in ("video", "vision_start", "vision_end")}
    config = getattr(transformers, f"{name}Config")(
        text_config=dict(rope_parameters=rope, **size), vision_config=dict(
            depth=2, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=8,
            out_hidden_size=32, initializer_range=0.3, **vision),
        image_token_id=tokenizer.image_token_id, **marks)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), images


def gemma4(tokenizer, size):
    """Two layers have no keys of their own, and each has embeddings of its own."""
    config = transformers.Gemma4Config(
        text_config=dict(head_dim=8, global_head_dim=16, sliding_window=24, num_kv_shared_layers=2,
                         layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0,
                         hidden_size_per_layer_input=8,
                         vocab_size_per_layer_input=size["vocab_size"], **size),
        vision_config=dict(num_key_value_heads=2, head_dim=8, pooling_kernel_size=2,
                           position_embedding_size=64, **VISION), audio_config=None,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        **{f"{mark}_token_id": getattr(tokenizer, f"{mark}_token_id")
           for mark in ("image", "audio", "boi", "eoi")})
    processor = TORCHVISION and transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4ImageProcessor(
            patch_size=8, pooling_kernel_size=2, max_soft_tokens=70), tokenizer,
        transformers.Gemma4VideoProcessor())
    return transformers.Gemma4ForConditionalGeneration(config), processor or Processor(
        "Gemma4", feature_extractor="AudioFeatureExtractor", image_processor="ImageProcessor",
        video_processor="VideoProcessor")


def mistral3(tokenizer, size):
    """Ministral 3."""
    config = transformers.Mistral3Config(
        text_config=dict(model_type="ministral3", head_dim=8, **size),
        vision_config=dict(model_type="pixtral", head_dim=8, **VISION), spatial_merge_size=2,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    processor = TORCHVISION and transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(patch_size=16, size=dict(longest_edge=64)), tokenizer, 8,
        2, image_token="<image>", image_break_token="<break>", image_end_token="<end>")
    return (transformers.Mistral3ForConditionalGeneration(config),
            processor or Processor("Pixtral"))


class Processor:
    """In the place of one that cannot be made without torchvision: the file that names it."""

    def __init__(self, name, **parts):
        self.file = json.dumps({"processor_class": f"{name}Processor"} | {
            part: {f"{part}_type": f"{name}{kind}"} for part, kind in parts.items()})

    def save_pretrained(self, folder):
        (folder / "processor_config.json").write_text(self.file)


FURTHER_MARKS = {
    **dict.fromkeys((qwen2_5_vl, qwen3_vl, qwen3_5),
                    ["<|video|>", "<|vision_start|>", "<|vision_end|>"]),
    gemma4: ["<|video|>", "<audio>", "<audio begins>", "<audio ends>"], mistral3: ["<break>"]}


@functools.cache
def folder_of(family, tmp):
    words, further = tiny()[0].tokenizer, FURTHER_MARKS.get(family, [])
    named = dict(image_token="<image>", boi_token="<begin>", eoi_token="<end>")
    if family is gemma4:
        named |= dict(zip(("audio_token", "boa_token", "eoa_token"), further[1:]))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(words.backend_tokenizer), pad_token=words.pad_token,
        eos_token=words.eos_token, chat_template=words.chat_template,
        additional_special_tokens=["<|im_start|>", *MARKS, *further],
        model_specific_special_tokens=named)
    torch.manual_seed(0)
    model, processor = family(tokenizer, SIZES | dict(vocab_size=len(tokenizer)))
    if family is gemma3:
        model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()  # else 0
    folder = tmp / family.__name__
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
