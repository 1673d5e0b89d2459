"""A reading of a healthy run, to vary in tests."""

from dino_vit.training.diagnosis import Reading

HEALTHY = Reading(
    step=10_000,
    total_steps=100_000,
    epoch=8.0,
    loss=9.1,
    prototypes=65536,
    mean_output_entropy=8.5,
    output_entropy=6.0,
    entropy_gap=2.5,
    student_divergence=3.1,
    prototypes_in_use=300,
    rows=1024,
    embedding_std=0.8,
    gradient_norm=2.0,
    lr=5e-4,
    weight_decay=0.05,
    momentum=0.996,
    teacher_temp=0.04,
    images_per_second=2310.0,
    data_wait=0.01,
    nonfinite_steps=0,
)
