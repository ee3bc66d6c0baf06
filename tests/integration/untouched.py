"""What a model is made of, besides the values of its weights."""


def everything(model):
    """All that could differ from a model never touched: config, weights, attributes and hooks of each module."""
    return {
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "weights": list(model.state_dict()),
        "modules": {name: set(vars(module)) for name, module in model.named_modules()},
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
    }
