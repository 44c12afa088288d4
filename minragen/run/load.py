"""Load any model that a user names, or say in one sentence why it cannot be used.

Reading order: `load_policy`, `why_unsupported`. What the weights compute is proved in proof.py.

Tests: `python -m pytest tests/test_models.py tests/test_families.py tests/test_vision.py`.
"""

import json
from pathlib import Path
from textwrap import shorten

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from transformers.utils import cached_file

from minragen.models import Policy

transformers.logging.set_verbosity_error()  # what matters is said in our sentences
transformers.logging.disable_progress_bar()
ATTENTION, STATES = {"full_attention", "sliding_attention"}, {"linear_attention", "conv", "hybrid"}
NO_CODE = {"trust_remote_code": False}  # else transformers asks whether to run a folder's Python
# The files of a processor, which a vision-language model has beside its tokenizer.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json",
                   "video_preprocessor_config.json")


def load_policy(source, device="cpu", stored_dtype=False, name="", sees=lambda: True):
    """The policy in a folder or behind a Hugging Face id, checked.

    stored_dtype: keep the dtype of the files, as for checkpoints and bundled models; otherwise a
        GPU gets bfloat16. On a CPU it is float32 either way.
    name: what messages call it; empty: the source
    sees: called for a vision-language model: whether it has to see, and so needs its processor
    raises: ValueError for what cannot be loaded, RuntimeError for an unsupported architecture
    """
    device, name, kind = torch.device(device), name or str(source), Policy
    dtype = torch.float32 if device.type == "cpu" else "auto" if stored_dtype else torch.bfloat16
    try:
        config = transformers.AutoConfig.from_pretrained(source, **NO_CODE)
        config._attn_implementation = None  # a folder's own may name a kernel to be fetched
        if not (refused := why_unsupported(config)):
            package = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            loader = (transformers.AutoModelForImageTextToText if package else
                      transformers.AutoModelForCausalLM)
            model, loading = loader.from_pretrained(  # NOTE: dtype as in models.load_policy
                source, config=config, dtype=dtype, output_loading_info=True,
                ignore_mismatched_sizes=True, **NO_CODE)
            # Without its top_k and penalties, with which nothing is sampled here.
            ids = {f"{token}_token_id": getattr(model.generation_config, f"{token}_token_id")
                   for token in ("bos", "eos", "pad")}
            model.generation_config = transformers.GenerationConfig(
                **{name: value for name, value in ids.items() if value != -1})  # -1: no token
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **NO_CODE)
            if package:
                from minragen.more.vision import SeeingPolicy as kind

                model = vision_language_model(model, tokenizer, source, sees)
    except Exception as error:  # a folder may hold anything
        said = ("there is no such folder." if isinstance(error.__cause__, HFValidationError)
                else shorten(str(error), 300) or type(error).__name__)
        raise ValueError(f"cannot load model {name!r}: {said} Give a bundled model (tiny, "
                         f"tiny-vlm, smollm2), a local folder or a Hugging Face id.") from None
    if refused:
        raise RuntimeError(f"model {name!r} {refused}. docs/models.md lists what works.")
    wrong = [f"{len(keys)} {kind}, e.g. {min(map(str, keys))}" for kind in (
        "missing", "unexpected", "mismatched") if (keys := loading[f"{kind}_keys"])]
    if wrong:  # what is missing would stay random
        raise ValueError(f"the weights of model {name!r} do not fit its config.json: "
                         f"{'; '.join(wrong)}. Take the config.json and names of one model.")
    spelt = tokenizer.decode(tokenizer("a", add_special_tokens=False)["input_ids"])
    if spelt.strip().lower() != "a":  # without files transformers makes one that has no words
        raise ValueError(f"the tokenizer of model {name!r} reads 'a' as {spelt!r}: its files are "
                         f"missing or broken. Give a folder with a tokenizer.json.")
    size, added = model.config.get_text_config().vocab_size, tokenizer.added_tokens_decoder
    beyond = [token for token, i in tokenizer.get_vocab().items() if i >= size and not (
        # Special tokens that no template writes are never encoded: Gemma 3 has one for images.
        i in added and added[i].special and token not in str(tokenizer.chat_template))]
    if beyond:
        raise ValueError(f"the tokenizer of model {name!r} has tokens beyond the vocabulary of "
                         f"{size}: {', '.join(beyond[:3])}. Resize the model's embeddings.")
    policy = kind(name, model.to(device).eval(), tokenizer)
    if layer_kinds(config) & STATES:
        from minragen.more.hybrid import prepare

        prepare(policy)
    return policy


def vision_language_model(whole, tokenizer, source, sees):
    """A model of transformers as a VisionLanguageModel. Its tokenizer may lack the chat template,
    which older folders have in a file of the processor."""
    from minragen.more.vision import VisionLanguageModel

    files = {}
    for name in (*PROCESSOR_FILES, "chat_template.json"):
        if path := cached_file(source, name, _raise_exceptions_for_missing_entries=False):
            files[name] = Path(path).read_bytes()
    if template := files.pop("chat_template.json", None):
        tokenizer.chat_template = tokenizer.chat_template or str(
            json.loads(template)["chat_template"])
    processor = processor_of(whole.config, source) if files and sees() else None
    return VisionLanguageModel(whole, processor, files)


def processor_of(config, source):
    """The processor of a vision-language model; None if it has none for images.

    raises: ImportError for a package that it needs
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING  # may import torchvision

    try:
        processor = transformers.AutoProcessor.from_pretrained(source, **NO_CODE)
    except ImportError as error:
        if "torchvision" not in str(error).lower():
            raise
        parts = classmethod(lambda cls: ["image_processor", "tokenizer"])
        try:  # Qwen's need it for videos alone
            kind = PROCESSOR_MAPPING[type(config)]
            kind = type(kind.__name__, (kind,), {"get_attributes": parts})
            processor = kind.from_pretrained(source, **NO_CODE)
        except (ImportError, TypeError, KeyError):
            raise ImportError(
                "to see images it needs torchvision. Install the one for your PyTorch (pip install "
                "torchvision) or choose a view without images.") from None
    return processor if hasattr(processor, "image_processor") else None


def why_unsupported(config):
    """Why a rollout cannot cache this architecture; "" if it can."""
    text = config.get_text_config()
    others = sorted(layer_kinds(config) - ATTENTION - STATES - {"mlp", "moe"})
    if config.is_encoder_decoder:
        return "is an encoder-decoder, and only decoders continue a conversation"
    if others:
        return f"has layers {others}, which a rollout cannot cache"
    if getattr(text, "alibi", False) or not hasattr(text, "max_position_embeddings"):
        return "takes no position_ids, which conversations of different lengths need"
    return ""


def layer_kinds(config):
    """The kinds of a decoder's layers; none are named if all have full attention."""
    text = config.get_text_config()
    return {*(getattr(text, "layer_types", None) or getattr(text, "attention_layers", None) or [])}
