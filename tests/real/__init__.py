"""Programs that others asked about, each with its repaired twin, and healthy ones: the yardstick of the diagnosis."""
