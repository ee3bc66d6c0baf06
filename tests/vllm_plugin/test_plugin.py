"""A compressed model in vLLM writes what transformers' generate writes, whatever is scheduled beside it."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.nn.functional import pad
from vllm import LLM, SamplingParams
from vllm.v1.attention.backend import AttentionCGSupport

from dofla.vllm.layer import heads_of, page_bytes
from dofla.vllm.metadata import CompressedCacheBuilder
from dofla.vllm.model import DoflaForCausalLM, DoflaHybridForCausalLM
from dofla.vllm.plugin import _architecture, register

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFTED = {"method": "draft_model", "num_speculative_tokens": 2}
MOVES = {"kv_connector": "DoflaConnector", "kv_role": "kv_both"}
IN_TMP = MOVES | {"kv_connector_extra_config": {"folder": "/tmp"}}
GREEDY = SamplingParams(max_tokens=12, min_tokens=12, temperature=0)


def engine(folder, **options):
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16} | options
    options.setdefault("enable_prefix_caching", False)
    return LLM(str(folder), **options)


@pytest.fixture(scope="module")
def llm(compressed):
    """Reads at most 64 tokens a step, so that prompts are read in several."""
    made = engine(compressed[1], max_num_batched_tokens=64)
    yield made
    del made
    gc.collect()


def test_all_that_a_model_calls_has_room_in_the_chunk_of_its_frame():
    for model in (DoflaForCausalLM, DoflaHybridForCausalLM):
        assert model.forward.__code__.co_stacksize >= 2**14  # 8 bytes each; chunks have 2^14 bytes


def texts(llm, prompts, sampling=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def model_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def cache_of(llm):
    core = llm.llm_engine.engine_core.engine_core
    return core.scheduler.kv_cache_manager.block_pool


def test_a_single_request_is_answered_as_generate_does(llm, prompts, check):
    check(15, *texts(llm, prompts[-1:]))


def test_sixteen_requests_at_once_are_answered_as_each_alone(llm, prompts, check):
    for n, tokens in enumerate(texts(llm, prompts)):
        check(n, tokens)


def test_a_request_has_one_page_a_layer_and_gives_it_back(llm, prompts):
    pool = cache_of(llm)
    free = pool.get_num_free_blocks()
    for n, prompt in enumerate(prompts[:3]):
        llm.llm_engine.add_request(f"page {n}", {"prompt_token_ids": prompt}, GREEDY)
    for _ in range(3):
        llm.llm_engine.step()
    assert free - pool.get_num_free_blocks() == 3
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert pool.get_num_free_blocks() == free


def test_pages_are_as_large_as_the_states_of_their_layers(llm, compressed):
    layers = compressed[0].config.quantization_config.plan.layers
    sizes = {layer.name: page_bytes(layer, llm.llm_engine.model_config.max_model_len, 1) for layer in layers}
    assert len(set(sizes.values())) > 1
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    assert len(config.kv_cache_groups) == 1
    assert config.kv_cache_tensors[0].size == config.num_blocks * sum(sizes.values())


def test_a_step_can_be_a_cuda_graph(llm, prompts, check, monkeypatch):
    """As on a GPU: rows are filled up with such as have no token, the tensor of pages stays where it is, and lengths
    that are on the GPU are not asked for."""
    build, places, filled = CompressedCacheBuilder.build, {}, set()

    def padded(builder, prefix, common, fast_build=False):
        rows, starts = common.num_reqs + 2, common.query_start_loc_cpu
        common = replace(
            common,
            num_reqs=rows,
            query_start_loc_cpu=pad(starts, (0, 2), value=int(starts[-1])),
            seq_lens=None,
            seq_lens_cpu_upper_bound=pad(common.seq_lens_cpu_upper_bound, (0, 2)),
            block_table_tensor=pad(common.block_table_tensor, (0, 0, 0, 2)),
        )
        (found,) = build(builder, prefix, common, fast_build)
        places.setdefault(builder, set()).add(found.pages.data_ptr())
        filled.update(builder._pages[rows - 2 : rows].tolist())
        assert len(found.pages) == len(found.starts) - 1 == rows - 2
        return [found]

    monkeypatch.setattr(CompressedCacheBuilder, "build", padded)
    for n, tokens in enumerate(texts(llm, prompts[:8])):
        check(n, tokens)
    assert [len(own) for own in places.values()] == [1] * len(places)
    assert filled == {0}


@pytest.mark.parametrize(("candidates", "wanted"), [(0, "UNIFORM_SINGLE_TOKEN_DECODE"), (3, "NEVER")])
def test_cuda_graphs_are_for_single_tokens(candidates, wanted):
    support = CompressedCacheBuilder.get_cudagraph_support(SimpleNamespace(num_speculative_tokens=candidates), None)
    assert support == AttentionCGSupport[wanted]


def test_an_aborted_request_leaves_the_others_alone(llm, prompts, check):
    pool = cache_of(llm)
    free, found = pool.get_num_free_blocks(), {}
    for n in (9, 10, 11):
        llm.llm_engine.add_request(str(n), {"prompt_token_ids": prompts[n]}, GREEDY)
    for _ in range(4):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["10"])
    while llm.llm_engine.has_unfinished_requests():
        found |= {out.request_id: out for out in llm.llm_engine.step() if out.finished}
    assert len(found) == 2
    for out in found.values():
        check(prompts.index(list(out.prompt_token_ids)), list(out.outputs[0].token_ids))
    assert pool.get_num_free_blocks() == free
    check(10, *texts(llm, prompts[10:11]))  # in a page that another request has left


def test_sampling_follows_its_seed(llm, prompts):
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    assert texts(llm, prompts[:4], seeded) == texts(llm, prompts[:4], seeded)


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [None, NGRAM])
def test_what_is_important_of_a_prompt_is_retained_as_in_transformers(
    important, prompts, check_important, candidates, monkeypatch
):
    if candidates:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # once numba is imported, no other engine can be made
    llm = engine(important[1], max_num_batched_tokens=4096, speculative_config=candidates)
    for n, tokens in enumerate(texts(llm, prompts)):
        check_important(n, tokens)


@pytest.mark.slow
def test_more_requests_than_pages_wait_for_their_turn(compressed, prompts, check):
    few = engine(compressed[1], num_gpu_blocks_override=6)
    for n, tokens in enumerate(texts(few, prompts)):
        check(n, tokens)


@pytest.mark.parametrize("kind", ["mixed", "sliding"])
def test_softmax_and_sliding_layers_beside_compressed_ones(kind, prompts, request):
    _, folder = request.getfixturevalue(kind)
    both = engine(folder, max_num_batched_tokens=64)
    assert isinstance(model_of(both), DoflaHybridForCausalLM)
    for n, tokens in enumerate(texts(both, prompts)):
        request.getfixturevalue(f"check_{kind}")(n, tokens)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("compressed", "tensor_parallel_size"),
        ("mixed", "tensor_parallel_size"),
        ("compressed", "pipeline_parallel_size"),
    ],
)
@pytest.mark.slow
def test_two_processes_share_a_model(kind, parts, prompts, request):
    """Each has the pages of its heads, or of its layers. (On a CPU vLLM's pipelines want compiling, and softmax layers
    in all parts or in none.)"""
    options = {"enforce_eager": parts == "tensor_parallel_size", "distributed_executor_backend": "mp", parts: 2}
    both = engine(request.getfixturevalue(kind)[1], **options)
    check = request.getfixturevalue("check" if kind == "compressed" else "check_mixed")
    for n, tokens in enumerate(texts(both, prompts)):
        check(n, tokens)


@pytest.mark.parametrize(
    ("heads", "ranks", "wanted"),
    [(8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]), (2, 4, [[0], [0], [1], [1]]), (1, 2, [[0], [0]]), (3, 1, [[0, 1, 2]])],
)
def test_heads_are_divided_as_vllm_divides_them(heads, ranks, wanted):
    assert [heads_of(heads, rank, ranks) for rank in range(ranks)] == wanted


def test_weights_in_int8(int8, prompts):
    pytest.importorskip("torchao")
    for n, tokens in enumerate(texts(engine(int8[0]), prompts)):
        int8[1](n, tokens)


@pytest.mark.parametrize("kind", ["compressed", "mixed"])
@pytest.mark.slow
def test_candidates_that_are_refused_leave_no_trace(kind, prompts, request, monkeypatch):
    folder, longer = request.getfixturevalue(kind)[1], SamplingParams(max_tokens=40, min_tokens=40, temperature=0)
    alone = engine(folder, max_num_batched_tokens=64)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # once numba is imported, no other engine can be made
    drafted = engine(folder, max_num_batched_tokens=64, speculative_config=NGRAM)
    asked = prompts[::2] + [prompt[:30] * 4 + prompt[:11] for prompt in prompts[-4:]]
    for _ in range(2):  # in pages that others have left, too
        assert texts(drafted, asked, longer) == texts(alone, asked, longer)
    steps = [0, 0]
    for n, llm in enumerate((alone, drafted)):
        llm.llm_engine.add_request(f"steps {n}", {"prompt_token_ids": asked[-1]}, longer)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            steps[n] += 1
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_config": DRAFTED}, "cannot have that of a draft model .'draft_model'.: give"),
        ({"kv_transfer_config": MOVES | {"kv_connector": "ExampleConnector"}}, "'ExampleConnector' does not move"),
        ({"kv_transfer_config": MOVES}, "name the folder of conversations"),
        ({"kv_transfer_config": IN_TMP, "speculative_config": NGRAM}, "moves no states beside --speculative-config"),
        ({"kv_transfer_config": IN_TMP, "tensor_parallel_size": 2}, "moves no states beside --tensor-parallel-size"),
    ],
)
def test_what_a_state_cannot_do_is_refused(compressed, plain, options, words):
    if options.get("speculative_config") is DRAFTED:
        options["speculative_config"] = DRAFTED | {"model": str(plain[1])}
    with pytest.raises(Exception, match=words):
        engine(compressed[1], **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compressed", "mixed", "sliding"])
def test_requests_go_on_from_states_of_known_prefixes(kind, prompts, request):
    folder, story = request.getfixturevalue(kind)[1], prompts[-1]
    alone = engine(folder, max_num_batched_tokens=64)
    both = engine(folder, max_num_batched_tokens=64, enable_prefix_caching=True, block_size=32)
    asked = [story[:length] + other[:20] for length, other in zip((31, 64, 65, 300, 330), prompts[9:], strict=False)]
    longer = SamplingParams(max_tokens=40, min_tokens=40, temperature=0)
    wanted = texts(alone, asked, longer)
    assert texts(both, [story[:320]], longer) == texts(alone, [story[:320]], longer)
    known = []
    for _ in range(2):
        outputs = both.generate([{"prompt_token_ids": ids} for ids in asked], longer, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        known.append([output.num_cached_tokens for output in outputs])
    block = both.llm_engine.vllm_config.cache_config.block_size  # larger beside softmax layers
    assert known[0][3] == 300 // block * block > 0
    assert all(tokens >= (len(ids) - 1) // block * block - block for tokens, ids in zip(known[1], asked, strict=True))
    turns = [ids + answer for ids, answer in zip(asked, wanted, strict=True)]  # of a conversation
    assert texts(both, turns, longer) == texts(alone, turns, longer)


def test_states_of_prefixes_are_five_hundred_tokens_apart(compressed):
    cache = engine(compressed[1], enable_prefix_caching=True).llm_engine.vllm_config.cache_config
    assert cache.block_size == cache.mamba_block_size == 512


def test_features_are_refused(features):
    with pytest.raises(Exception, match=r"model.layers.0.self_attn has feature maps"):
        engine(features)


def test_other_models_are_those_of_vllm(plain):
    made = engine(plain[1])
    assert not isinstance(model_of(made), DoflaForCausalLM | DoflaHybridForCausalLM)


def test_a_config_that_says_outright_that_nothing_is_quantized_is_read():
    assert _architecture(SimpleNamespace(hf_config=SimpleNamespace(quantization_config=None))) is None
    assert _architecture(SimpleNamespace(hf_config=SimpleNamespace())) is None


def test_an_old_vllm_gets_a_message(monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.31.2+cpu")
    monkeypatch.setattr("vllm.__version_tuple__", (0, 31, 2, "cpu"))
    monkeypatch.setattr("vllm.model_executor.models.ModelRegistry.models", {})
    register()
    assert "need vLLM 0.32 or newer, this is 0.31.2+cpu: install it anew" in caplog.text
