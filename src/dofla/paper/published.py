"""The published figures of arXiv 2507.03340, for the tables that show ours beside them."""

DIMENSIONS = {
    "GPT-2 (C = 64, λ = 2⁻⁴)": [130, 182, 35, 44, 42, 65, 92, 33, 28, 34, 46, 39],
    "Pythia-1B (C = 128, λ = 2⁻⁸)": [277, 138, 275, 132, 204, 167, 115, 142, 231, 64, 96, 73, 40, 52, 34, 9],
}
"""Table 1."""

DOF_LAYER_1 = [4.7, 8.1, 4.5, 2, 3.6, 16.2, 4.5, 2.6, 4.1, 6.4, 5, 150]
"""Table 2, the first layer of GPT-2."""

STUDENTS = {
    "Original": (".4266", "3.3558"),
    "DiJiang": (".3409", "5.5965"),
    "Performer": (".3952", "8.1586"),
    "Fix, direct": (".4141", "3.9657"),
    "Fix, softmax": (".3958", "5.4082"),
    "Fix, l2": (".3980", "6.2453"),
    "DoF, direct": (".4182", "5.2651"),
    "DoF, softmax": (".4190", "4.0170"),
    "DoF, l2": (".3965", "6.6802"),
    "DoF + Clip, direct": (".4223", "5.4547"),
    "DoF + Clip, softmax": (".4182", "4.0355"),
    "DoF + Clip, l2": (".4079", "6.2378"),
}
ACCURACY = {name: accuracy for name, (accuracy, _) in STUDENTS.items()} | {"Wide (182 everywhere), softmax": ".4149"}
"""Table 3: GPT-2, average over seven tasks after fine-tuning; and 182 features in every layer, from its text."""

LOSSES = {name: loss for name, (_, loss) in STUDENTS.items()}
"""Table 7: next-token loss of distilled GPT-2, nats."""

GENERATION = {"Fix": "15.589", "DoF": "15.579", "DoF + Clip": "14.662"}
"""Table 4: seconds for a sequence of 1,000 tokens, GPT-2."""

SAMPLE = {"direct": "109.4", "softmax": "90.4", "l2": "60.6"}
"""Table 5: milliseconds per training sample, GPT-2."""

PYTHIA_ACCURACY = {"Original": ".4279", "Fix": ".4014", "DoF": ".4118"}
"""Table 6: Pythia-1B, average over seven tasks after fine-tuning, softmax loss."""

L2_ERRORS = {
    "Fix": ([8.7, 10.6, 3.74, 2.39, 3.48, 1.77, 1.8, 1.21, 1.19, 1.22, 1.32, 8.26], "45.68"),
    "DoF": ([7.83, 8.92, 4.15, 2.5, 3.48, 1.76, 1.76, 1.24, 1.33, 1.29, 1.32, 8.52], "44.1"),
}
"""Table 11: L2 error ×10⁻³ per layer of GPT-2, and their total."""

TRAINING_TIME = {
    "Fix": ("10 h 44", "8 h 53", "5 h 57"),
    "DoF": ("10 h 45", "8 h 59", "6 h 03"),
    "DoF + Clip": ("10 h 35", "8 h 51", "5 h 43"),
}
"""Table 12: feature training of GPT-2 with the direct, softmax and L2 losses, four A100."""

ALGORITHM_1 = {"GPT-2": "105 s", "Pythia-1B": "477 s"}
"""Table 12: choosing the dimensions."""

TASKS = ("piqa", "logiqa", "arc_easy", "arc_challenge", "winogrande", "mmlu", "wsc273")
"""The tasks of tables 3 and 6."""

FINETUNING = {
    ("gpt2", 768, 12): ((1e-4, 5e-5, 1e-4, 1e-5, 5e-4, 1e-6, 1e-6), (128, 64, 64, 64, 128, 64, 128)),
    ("gpt_neox", 2048, 16): ((1e-5, 5e-5, 5e-5, 5e-5, 5e-5, 5e-6, 5e-5), (64, 32, 32, 32, 64, 32, 64)),
}
"""Type, width and depth of GPT-2 and Pythia-1B: learning rates, the best for the original, and batch sizes (Table 9) of
fine-tuning, for each of :data:`TASKS`."""
