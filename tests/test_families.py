"""Which architectures can be trained: with random weights they work, or a sentence refuses them.

docs/models.md lists each of FAMILIES in the row of what is measured.
"""

import contextlib
import copy
import functools
import itertools
import re
import tempfile

import pytest
import torch
import transformers
from toys import tiny

from lab.figure import ROOT
from minragen.config import Config
from minragen.envs import EnvGroups
from minragen.fast.policies import faster
from minragen.look import diagnostics
from minragen.models import Critic
from minragen.rollout import Rules, collect
from minragen.run import memory
from minragen.run.load import load_policy
from minragen.run.proof import prove
from minragen.train import Learner
from minragen.trajectory import make_batch

PAGE = (ROOT / "docs" / "models.md").read_text()
CONTEXT, WINDOW = 320, 24
# A family takes those that it knows. Large weights: a wrong mask costs whole nats.
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3)
SLIDING = dict(sliding_window=WINDOW)
MIXED = SLIDING | dict(layer_types=["sliding_attention", "full_attention"] * 2)
EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=16, shared_expert_intermediate_size=16)
DEEPSEEK = EXPERTS | dict(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
                          head_dim=4, num_key_value_heads=4, q_lora_rank=8, n_routed_experts=4,
                          n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)
LINEAR = dict(layer_types=["linear_attention"] * 3 + ["full_attention"])
DELTA = LINEAR | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
                      linear_value_head_dim=8, head_dim=8)
CONVOLUTIONS = dict(layer_types=["conv", "conv", "full_attention", "conv"])
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2)
GEMMA = dict(head_dim=8, query_pre_attn_scalar=8)
GEMMA4 = MIXED | dict(head_dim=8, global_head_dim=16, num_kv_shared_layers=2,
                      hidden_size_per_layer_input=8, vocab_size_per_layer_input=400)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=16, patch_size=8)
MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))


def package(text, **vision):
    """The options of a vision-language model. What its text has is not its own option."""
    return dict(text_config=SIZES | dict(vocab_size=400) | text, vision_config=vision)


def qwen_tower(**options):
    return dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=8,
                out_hidden_size=32, **options)


def rope(rope_type, original=CONTEXT // 4, **options):
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=1e4, factor=4.0,
                                     original_max_position_embeddings=original, **options))


def longrope(original):
    return dict(original_max_position_embeddings=original) | rope(
        "longrope", original, short_factor=[1.0] * 4, long_factor=[3.0] * 4)


FAMILIES = {  # name: class of the configuration, options
    "Llama": ("Llama", {}),
    "Llama, linear rope": ("Llama", rope("linear")),
    "Llama 3": ("Llama", rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "Llama, yarn": ("Llama", rope("yarn")),
    "Llama, dynamic rope": ("Llama", rope("dynamic")),
    "Llama, dynamic rope, longer": ("Llama", rope("dynamic") | dict(max_position_embeddings=80)),
    "Llama 4": ("Llama4Text", {}),
    "Mistral, window": ("Mistral", SLIDING),
    "Ministral": ("Ministral", MIXED | dict(head_dim=8)),
    "Mixtral, window": ("Mixtral", SLIDING | EXPERTS),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, windows": ("Qwen2", SLIDING | dict(use_sliding_window=True, max_window_layers=2)),
    "Qwen2-MoE": ("Qwen2Moe", EXPERTS),
    "Qwen3": ("Qwen3", dict(head_dim=16)),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS | dict(head_dim=16)),
    "Qwen3-Next": ("Qwen3Next", EXPERTS | DELTA),
    "Qwen3.5": ("Qwen3_5Text", DELTA),
    "Qwen3.5-MoE": ("Qwen3_5MoeText", EXPERTS | DELTA),
    "Kimi Linear": ("KimiLinear", DEEPSEEK | LINEAR | dict(
        linear_head_dim=8, linear_num_heads=4, mlp_layer_types=["dense"] * 4)),
    "OLMo Hybrid": ("OlmoHybrid", DELTA),
    "LFM2": ("Lfm2", CONVOLUTIONS),
    "LFM2-MoE": ("Lfm2Moe", EXPERTS | CONVOLUTIONS),
    "LFM3": ("Lfm3", CONVOLUTIONS | SLIDING | dict(
        head_dim=8, layer_types=["conv", "full_attention", "conv", "sliding_attention"])),
    "Granite 4 H": ("GraniteMoeHybrid", LINEAR | MAMBA | dict(
        num_local_experts=0, shared_intermediate_size=48, logits_scaling=4.0)),
    "Granite 4, dense": ("GraniteMoeHybrid", MAMBA | dict(
        layer_types=["full_attention"] * 4, num_local_experts=0, shared_intermediate_size=48)),
    "Falcon-H1": ("FalconH1", MAMBA | dict(mamba_d_ssm=64)),
    "Bamba": ("Bamba", MAMBA | dict(attn_layer_indices=[3])),
    "Nemotron-H": ("NemotronH", dict(
        layer_types=["linear_attention", "mlp", "full_attention", "linear_attention"], head_dim=8,
        ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2)),
    "Zamba 2": ("Zamba2", dict(
        layers_block_type=["linear_attention", "hybrid"] * 2, mamba_d_state=8, n_mamba_heads=8,
        mamba_ngroups=2, num_mem_blocks=1, adapter_rank=8)),
    "Gemma": ("Gemma", GEMMA),
    "Gemma 2": ("Gemma2", GEMMA | SLIDING | dict(final_logit_softcapping=3.0)),
    "Gemma 3": ("Gemma3Text", GEMMA | MIXED),
    "Gemma 3, with its vision tower": ("Gemma3", package(GEMMA | MIXED, **VISION)),
    "Gemma 4": ("Gemma4Text", GEMMA4),
    "Gemma 4, with its vision tower": ("Gemma4", dict(audio_config=None) | package(
        GEMMA4, num_key_value_heads=2, head_dim=8, position_embedding_size=16, **VISION)),
    "Ministral 3": ("Ministral3", dict(head_dim=8)),
    "Ministral 3, with its vision tower": ("Mistral3", package(
        dict(model_type="ministral3", head_dim=8), model_type="pixtral", head_dim=8, **VISION)),
    "Qwen2.5-VL": ("Qwen2_5_VL", package(
        MROPE, **qwen_tower(fullatt_block_indexes=[0]))),
    "Qwen3-VL": ("Qwen3VL", package(MROPE | dict(head_dim=8), **qwen_tower(
        deepstack_visual_indexes=[0], num_position_embeddings=16))),
    "Qwen3.5, with its vision tower": ("Qwen3_5", package(
        DELTA | dict(initializer_range=0.1), **qwen_tower(num_position_embeddings=16))),
    "Phi": ("Phi", {}),
    "Phi-3, window": ("Phi3", SLIDING),
    "Phi-3, longrope": ("Phi3", longrope(CONTEXT)),
    "Phi-3, longrope, longer": ("Phi3", longrope(CONTEXT // 4)),
    "StarCoder2, window": ("Starcoder2", SLIDING),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": ("Olmo3", MIXED),
    "OLMoE": ("Olmoe", EXPERTS),
    "GPT-NeoX": ("GPTNeoX", {}),
    "GPT-Neo": ("GPTNeo", dict(attention_types=[[["global", "local"], 2]])),
    "GPT-2": ("GPT2", {}),
    "GPT-2, longer": ("GPT2", dict(max_position_embeddings=80)),
    "OPT": ("OPT", dict(ffn_dim=48, word_embed_proj_dim=32)),
    "Falcon": ("Falcon", {}),
    "Falcon, alibi": ("Falcon", dict(alibi=True)),
    "Bloom": ("Bloom", {}),
    "MPT": ("Mpt", {}),
    "StableLM": ("StableLm", {}),
    "GLM4": ("Glm4", dict(head_dim=8)),
    "EXAONE 4": ("Exaone4", MIXED),
    "ERNIE 4.5": ("Ernie4_5", dict(head_dim=8)),
    "Nemotron": ("Nemotron", {}),
    "SmolLM3": ("SmolLM3", dict(no_rope_layers=[1, 1, 0, 1])),
    "Granite": ("Granite", dict(logits_scaling=4.0, embedding_multiplier=2.0)),
    "Cohere": ("Cohere", dict(logit_scale=0.25)),
    "Cohere 2": ("Cohere2", MIXED | dict(logit_scale=0.25)),
    "gpt-oss": ("GptOss", MIXED | EXPERTS | dict(head_dim=8)),
    "DeepSeek V2": ("DeepseekV2", DEEPSEEK),
    "DeepSeek V3": ("DeepseekV3", DEEPSEEK),
    "Mamba": ("Mamba", {}),
    "Jamba": ("Jamba", dict(use_mamba_kernels=False)),
    "T5": ("T5", {}),
}
SOME = ("Gemma 2", "Cohere 2", "Mistral, window", "GPT-NeoX", "Mamba", "Jamba", "Bloom", "T5",
        "GPT-2, longer", "Phi-3, longrope, longer")  # long/test_at_length.py tries the others


def family(name):
    """A policy of a family with random weights and tiny's tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        write_family(name, folder)
        return faster(load_policy(folder, name="NAME"))


def write_family(name, folder, **sizes):
    """Write the folder of a family. sizes: other than SIZES"""
    kind, options = FAMILIES[name]
    kind, tokenizer = getattr(transformers, f"{kind}Config"), tiny()[0].tokenizer
    known, sizes = kind(), SIZES | dict(vocab_size=len(tokenizer) + 9, pad_token_id=0) | sizes
    config = kind(**{k: v for k, v in sizes.items() if hasattr(known, k)} | options)
    torch.manual_seed(0)
    config.save_pretrained(folder)
    sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    with contextlib.suppress(ValueError):  # no decoder: T5
        kind.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def listed_as(name):
    """What the page says of a family: the first cell of the one row that lists it."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    (said,) = [row[0] for row in rows if name in row[-1].split("; ")]
    return said


@functools.cache
@torch.no_grad()
def measured(name):
    """"works", or the sentence that refuses the family."""
    try:
        policy = family(name)
        prove(policy, CONTEXT)
    except (ValueError, RuntimeError) as error:  # how large a gap is depends on the processor
        return re.sub(r"[\d.e+-]+( nats| at most)", r"N\1", str(error))
    frame, rules = copy.copy(tiny()[1]), Rules(2.0, max_new_tokens=20, max_context=CONTEXT)
    frame.end_ids = set(range(0, len(frame.tokenizer), 8))  # replies of many lengths
    groups = EnvGroups("frozenlake", 3, 4, options={"view": "coord"})
    batch = make_batch(collect(policy, frame, groups, 0, rules))
    log_p = (policy.model(batch.tokens, use_cache=False).logits / 2.0).log_softmax(dim=-1)
    own = log_p[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
    gap = (own - batch.sample_logprobs[:, 1:])[batch.response_mask[:, 1:]].abs().max()
    assert gap < 1e-4, f"{name} is silently wrong by {gap:.2g} nats"
    assert batch.turn_ids.max() >= 2 and len(batch.lengths.unique()) > 2, name
    critic = Critic(policy)
    critic.head.weight.data += 1.0
    assert critic(batch.tokens, batch.response_mask)[batch.response_mask].std() > 0, name
    assert "MiB" in memory.forecast(Learner(policy, frame, None, critic), Config()), name
    return "works"


class TestFamilies:
    @pytest.mark.parametrize("name", SOME)
    def test_it_works_or_is_refused_as_the_page_says_and_is_never_silently_wrong(self, name):
        """The others: long/test_at_length.py."""
        assert listed_as(name) == measured(name)

    @pytest.mark.parametrize("name", ["Llama", "Ministral", "StarCoder2, window", "GPT-2, longer",
                                      "Qwen3.5", "LFM3", "Granite 4 H"])
    @torch.no_grad()
    def test_the_scores_of_the_diagnostics_are_those_of_full_passes(self, name):
        """A pair may exceed the token budget; one beyond the model's positions loses its start."""
        policy, rng = family(name), torch.Generator().manual_seed(0)
        prompts, reasonings = ([torch.randint(300, (n,), generator=rng).tolist() for n in lengths]
                               for lengths in ((49, 31, 12), (30, 6, 1)))
        prompts[2], reasonings[1] = prompts[0][:12], reasonings[0][:6]
        for temperature, budget in ((0.7, 1), (0.7, 10**6), (0, 8)):  # 0: greedy play
            scores = diagnostics.score_matrix(policy, prompts, reasonings, temperature, budget)
            for score, (z, x) in zip(scores.flatten(), itertools.product(reasonings, prompts)):
                logits = policy.model(torch.tensor([x + z])).logits[0, len(x) - 1:-1]
                log_p = (logits / (temperature or 1.0)).log_softmax(dim=-1)
                assert abs(log_p[range(len(z)), z].sum() - score) < 1e-3
        long, most = prompts[0] + reasonings[0], diagnostics.max_positions(policy.model)
        assert torch.equal(
            diagnostics.score_matrix(policy, [long], reasonings[:1]),
            diagnostics.score_matrix(policy, [(long + reasonings[0])[-most:-30]], reasonings[:1]))
