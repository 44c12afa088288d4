"""Vision-language policies. The tokens of an image are ids beyond the vocabulary.

The ids depend on the pixels alone: equal images have equal ids, and different ones none in common.
So KV slots, shared prompts, contexts and masks treat them like other ids. The embedding layer
replaces them by the output of the vision tower.

Reading order: `ImageStore` (images and their ids), `SeeingPolicy`, `VisionLanguageModel`, `_embed`,
then what only some models need: `_place_in_grids`, `_show_whole_images`, `_hide_images`.

Axes: V vocabulary, F tokens of an image, D hidden size, n rows, q tokens of each.

Tests: `python -m pytest tests/test_vision.py`.
"""

import base64
import hashlib
import inspect
import io
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from minragen.cache import attention_masks
from minragen.envs import image_of
from minragen.models import Policy


class ImageStore:
    """The distinct images since the last `forget`. An image's number i is a hash of its pixels; its
    ids are V + i F to V + (i + 1) F - 1.

    processor: of transformers; it says how many tokens an image has, and what stands around them
    config: the model's, which names the image token that the processor writes
    """

    def __init__(self, processor, config):
        self.processor, self.image_id = processor, config.image_token_id
        self.first = config.get_text_config().vocab_size
        # Qwen's chat templates write these two tokens, its processors do not.
        self.start, self.end = ([getattr(config, name)] if hasattr(config, name) else []
                                for name in ("vision_start_token_id", "vision_end_token_id"))
        rope = getattr(config.get_text_config(), "rope_parameters", None)
        if "mrope_section" in str(rope) and not self.start:
            raise ValueError("it marks images in a way that is not known here. Take Qwen2.5-VL, "
                             "Qwen3-VL or Qwen3.5.")
        self.merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
        self.shape = (64, 64, 3)  # of the images that are expected
        self.forget()

    def __deepcopy__(self, memo):
        return self  # critic and reference see the same images

    def forget(self):
        """Drop all images."""
        self.size = None  # F
        self._ids, self.pixels = {}, {}  # number -> ids; number -> the model's arguments

    def ids_of(self, image):
        """The ids that stand for an image, (H, W, 3) uint8, in a conversation.

        raises: ValueError for an image with more or fewer tokens than the others
        """
        # 48 bits: two of a step's thousand images share a number once in 10**8 steps.
        digest = hashlib.sha256(repr(image.shape).encode() + image.tobytes()).digest()
        number = int.from_bytes(digest[:6])
        if number not in self._ids:
            self._ids[number] = self._read(image, number)
        return self._ids[number]

    def expect(self, observations):
        """Note the shape of the first image: the proof at start-up then draws such images."""
        images = (image_of(observation) for observation in observations)
        self.shape = next((image.shape for image in images if image is not None), self.shape)

    def proof_ids(self, seed=0):
        """The ids of an image of noise, for the proof at start-up."""
        noise = np.random.default_rng(seed).integers(256, size=self.shape)
        return self.ids_of(noise.astype(np.uint8))

    def _read(self, image, number):
        read = self.processor(text=self.processor.image_token, images=[Image.fromarray(image)],
                              return_tensors="pt", add_special_tokens=False)
        ids = read.pop("input_ids")[0].tolist()
        size = ids.count(self.image_id)
        if not size:
            raise ValueError(f"the processor writes none of the model's image tokens, which have "
                             f"the id {self.image_id} in its config.json.")
        if self.size not in (None, size):
            raise ValueError(f"an image has {size} tokens and an earlier one has {self.size}. All "
                             f"must have as many: give images of one size.")
        self.size = size
        # pixel_values, and by family image_sizes, image_grid_thw, ...: what the tower takes
        self.pixels[number] = {n: x for n, x in read.items() if n.startswith(("pixel", "image"))}
        fresh = iter(range(self.first + number * size, self.first + (number + 1) * size))
        ids = [next(fresh) if i == self.image_id else i for i in ids]
        return [*self.start, *ids, *self.end]

    def numbers(self, ids):
        """(number of its image, index among the image's tokens) of each id of an image."""
        return (ids - self.first) // self.size, (ids - self.first) % self.size

    def grids(self, numbers):
        """Height and width (..., 2), in tokens, of the images with these numbers."""
        numbers, which = numbers.unique(return_inverse=True)
        found = [self.pixels[number]["image_grid_thw"][0, 1:] for number in numbers.tolist()]
        return (torch.stack(found).to(which.device) // self.merged)[which]

    def to_last(self, ids):
        """How many places after each id its image's last id is, (...) int64; 0 for text."""
        seen = ids >= self.first
        return (self.size - 1 - self.numbers(ids)[1]).where(seen, 0) if seen.any() else 0 * ids

    def arguments(self, whole, numbers):
        """{argument of the model: tensor} of images, by number, on the model's device."""
        chosen = [self.pixels[number] for number in numbers.tolist()]
        joined = {name: torch.cat([pixels[name] for pixels in chosen]) for name in chosen[0]}
        return {name: x.to(whole.device, whole.dtype if x.is_floating_point() else x.dtype)
                for name, x in joined.items()}


class SeeingPolicy(Policy):
    """A policy whose model is a VisionLanguageModel. Without a processor it reads text only."""

    @property
    def image_store(self):
        return self.model.image_store

    def begin_rollout(self):
        """Forget the images of the last rollout."""
        if self.image_store:
            self.image_store.forget()

    def end_rollout(self, trajectories):
        """Add the images that other processes showed, which are trained on too."""
        for turn in (turn for t in trajectories for turn in t.turns):
            if (image := image_of(turn.observation)) is not None:
                self.image_store.ids_of(image)


class VisionLanguageModel(nn.Module):
    """A vision-language model behind the interface of a causal language model: `base_model` is its
    decoder, whose embedding layer takes the ids of images.

    processor: of transformers; without one the model reads text only, and its tower is frozen
    files: {name: bytes} of the processor's files, which are saved as they were
    """

    def __init__(self, whole, processor=None, files=None):
        super().__init__()
        self.whole, self.files, self.image_store = whole, files, None
        if processor is None:
            whole.requires_grad_(False)
            for part in (self.base_model, whole.get_output_embeddings()):
                part.requires_grad_(True)
            return
        self.image_store = ImageStore(processor, whole.config)
        decoder, text = self.base_model, whole.config.get_text_config()
        embedding = decoder.get_input_embeddings()
        embedding.forward = partial(_embed, embedding.forward, self.image_store, whole.base_model)
        if layers := getattr(decoder, "embed_tokens_per_layer", None):  # Gemma 4
            layers.forward = partial(_hide_images, layers.forward, self.image_store,
                                     text.pad_token_id)
        if "mrope_section" in str(getattr(text, "rope_parameters", None)):  # Qwen-VL
            deep = "deepstack_visual_embeds" in inspect.signature(decoder.forward).parameters
            decoder.register_forward_pre_hook(
                partial(_place_in_grids, self.image_store, deep), with_kwargs=True)
        # The arguments by which `forward` is told which tokens are of images.
        self.kinds = {"token_type_ids", "mm_token_type_ids"} & {
            *inspect.signature(whole.forward).parameters}
        if "token_type_ids" in self.kinds:  # Gemma 3: the tokens of an image see each other
            decoder.register_forward_pre_hook(
                partial(_show_whole_images, self.image_store), with_kwargs=True)

    def forward(self, tokens, **options):
        """As transformers computes it, images given as pixels: for the proof at start-up."""
        if self.image_store is None:
            return self.whole(input_ids=tokens, **options)
        seen = tokens >= self.image_store.first
        if seen.any():
            numbers, _ = self.image_store.numbers(tokens[seen])  # of each token
            options |= self.image_store.arguments(self.whole, numbers[::self.image_store.size])
        options |= dict.fromkeys(self.kinds, seen.long())
        return self.whole(input_ids=tokens.masked_fill(seen, self.image_store.image_id), **options)

    @property
    def base_model(self):
        return self.whole.get_decoder()

    def __getattr__(self, name):
        """Everything else, such as the config and the output layer, is the model's."""
        if name in ("whole", "_modules"):
            return super().__getattr__(name)
        return getattr(self.whole, name)

    def save_pretrained(self, folder, state_dict):
        self.whole.save_pretrained(folder, state_dict={
            name.removeprefix("whole."): weight for name, weight in state_dict.items()})
        if self.files is None:  # made by run/tiny.py
            self.image_store.processor.save_pretrained(folder)
        for name, content in (self.files or {}).items():
            (Path(folder) / name).write_bytes(content)


def _embed(plain, image_store, vision_model, ids, layers=None):
    """Embeddings (..., D) of ids (...). Those of images come from the vision tower, which computes
    each image once, with gradients where they are wanted.

    plain: the embedding layer's own forward      vision_model: without its output layer
    layers: a list that gets the tower's DeepStack features, for the first decoder layers
    """
    seen = ids >= image_store.first
    embedded = plain(ids.masked_fill(seen, image_store.image_id))
    if not seen.any():
        return embedded
    numbers, features = image_store.numbers(ids[seen])
    numbers, which = numbers.unique(return_inverse=True)
    found = vision_model.get_image_features(**image_store.arguments(vision_model, numbers),
                                            return_dict=True)

    def of_ids(images):
        each = torch.cat([x.flatten(0, -2) for x in images]).unflatten(0, (-1, image_store.size))
        return each[which, features].to(embedded.dtype)  # from (images, F, D)

    if layers is not None:
        layers += map(of_ids, found.deepstack_features)
    return embedded.masked_scatter(seen[..., None], of_ids(found.pooler_output))


def _place_in_grids(image_store, deep, decoder, args, options):
    """Before a pass over ids: give them positions in three dimensions (M-RoPE, Wang et al. 2024).

    In an image of h x w tokens that begins at position p, token (i, j) has (p, p + i, p + j), and
    the text after it goes on at p + max(h, w). With an image of 2 x 3 tokens after two of text:

        place       0 1   2 3 4 5 6 7   8 9
        position    0 1   2 2 2 2 2 2   5 6
                    0 1   2 2 2 3 3 3   5 6
                    0 1   2 3 4 2 3 4   5 6

    So positions lag behind places, by h w - max(h, w) for each image that has ended. Slots keep
    this lag as a state (n, 1) of their rows.

    deep: whether the decoder's first layers take features of images, too (Qwen3-VL)
    """
    ids, slots = options.get("input_ids"), options.get("past_key_values")
    if ids is None:  # a pass over pixels, which has its positions
        return args, options
    seen = ids >= image_store.first
    row = column = gained = torch.zeros_like(ids)
    lag = gained[:, :1]
    if slots is not None and slots.state("lag") is not None:
        lag = slots.state("lag")
    first = options.get("position_ids", torch.arange(ids.shape[1], device=ids.device)) - lag
    if seen.any():
        numbers, which = image_store.numbers(ids)
        height, width = image_store.grids(numbers.where(seen, numbers[seen][0])).unbind(-1)
        ends = seen & (which == image_store.size - 1)
        gained = (image_store.size - height.maximum(width)).where(ends, 0)
        which = which.where(seen, 0)
        row, column = which // width, which % width
        first = first - which - (gained.cumsum(dim=1) - gained)
        if deep:
            options["deepstack_visual_embeds"] = layers = []
            options["inputs_embeds"] = decoder.get_input_embeddings()(ids, layers=layers)
            options |= dict(input_ids=None, visual_pos_masks=seen)
    options["position_ids"] = torch.stack([first, first + row, first + column])
    if slots is not None:
        slots.set_state("lag", lag + gained.sum(dim=1, keepdim=True))
    return args, options


def _show_whole_images(image_store, decoder, args, options):
    """Before a pass over ids: let each token of an image also see the tokens of it that follow.

    A rollout's pass with images gets it in place of its causal mask; the learner's has none yet.
    """
    ids, slots = options.get("input_ids"), options.get("past_key_values")
    if ids is not None and (slots is None or (ids >= image_store.first).any()):
        size = ids.shape[1] if slots is None else slots.get_seq_length()
        keys = torch.arange(size, device=ids.device)[None]
        queries = options.get("position_ids", keys)
        visible = keys[:, None, None] <= (queries + image_store.to_last(ids))[:, None, :, None]
        options["attention_mask"] = attention_masks(decoder, visible, queries, keys)
    return args, options


def _hide_images(plain, image_store, hidden_id, ids):
    """Per-layer embeddings (Gemma 4) of ids; ids of images get that of `hidden_id`, as upstream."""
    return plain(ids.masked_fill(ids >= image_store.first, hidden_id))


def with_tower(critic):
    """The critic, holding the vision tower that its trunk calls, so that the tower is trained."""
    forward = critic.trunk.get_input_embeddings().forward
    if isinstance(forward, partial):
        head = critic.head
        del critic.head  # to add it again as the last module: checkpoints number the parameters
        critic.vision_model, critic.head = forward.args[-1], head
    return critic


def images_of(trajectory):
    """{"images": the images of the messages in order, as data URIs}; {} without any."""
    seen = [image_of(turn.observation) for turn in trajectory.turns]
    found = [data_uri(image) for image in seen if image is not None]
    return {"images": found} if found else {}


def data_uri(image):
    """An image as text: a PNG in base64, as browsers and chat servers take it."""
    written = io.BytesIO()
    Image.fromarray(image).save(written, "png")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
