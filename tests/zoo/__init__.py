"""The zoo: small seeded trainings, healthy ones and ones with one planted fault each, for calibrating the rules."""

from zoo import (
    faults_attention,
    faults_gradients,
    faults_losses,
    faults_norms,
    faults_numbers,
    faults_units,
    faults_updates,
    faults_weights,
    healthy_sequences,
    healthy_special,
    healthy_tables,
    healthy_vision,
)
from zoo.case import Case, Specimen

HEALTHY: tuple[Specimen, ...] = (
    *healthy_vision.SPECIMENS,
    *healthy_sequences.SPECIMENS,
    *healthy_tables.SPECIMENS,
    *healthy_special.SPECIMENS,
)
FAULTS: tuple[Specimen, ...] = (
    *faults_numbers.SPECIMENS,
    *faults_units.SPECIMENS,
    *faults_weights.SPECIMENS,
    *faults_gradients.SPECIMENS,
    *faults_updates.SPECIMENS,
    *faults_losses.SPECIMENS,
    *faults_norms.SPECIMENS,
    *faults_attention.SPECIMENS,
)

__all__ = ["FAULTS", "HEALTHY", "Case", "Specimen"]
