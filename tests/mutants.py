"""Mutants: lines of the package, each made wrong in one place, and the test that notices.

A line is given without indentation and comment, and occurs once in its file. `test_mutants.py` applies the mutants.
If a line changes, change it here, too; if a mutant survives, make its test stronger.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A line of a file in ``src/torchhook``, what it becomes, and the test in ``tests`` that must fail then."""

    file: str
    line: str
    becomes: str
    test: str


MUTANTS = [
    # core: where and when
    Mutant(
        "core/tap.py",
        "return Passes(lambda number: number % n == 0)",
        "return Passes(lambda number: number % n == 1)",
        "core/test_passes.py::test_schedules_choose_passes",
    ),
    Mutant(
        "core/selection.py",
        'return Selector(lambda *place: not self.test(*place), f"~{self.label}", self.marks)',
        'return Selector(lambda *place: self.test(*place), f"~{self.label}", self.marks)',
        "core/test_selection.py::test_selectors_are_a_boolean_algebra",
    ),
    Mutant(
        "core/selection.py",
        'below = f"{path}.{name}" if path else name',
        "below = name",
        "seeds/test_capture_rows.py::test_c14_registration_in_bulk_by_type_glob_regex_and_predicate",
    ),
    Mutant(
        "core/hooks/shortcut.py",
        'module = frame.f_locals["self"] if frame.f_code is WRAPPED_CALL_CODE else self.module',
        "module = self.module",
        "core/test_shortcut.py::test_a_copy_by_hand_runs_its_own_forward",
    ),
    Mutant(
        "core/torch_internals.py",
        "if len(hooks) != 1 or number not in hooks or is_jit_tracing() or not is_called_by_torch(module):",
        "if number not in hooks or is_jit_tracing() or not is_called_by_torch(module):",
        "core/test_shortcut.py::test_hooks_that_come_later_run_after_the_capture",
    ),
    Mutant(
        "core/hooks/gradients.py",
        "if version_of(view) == version:",
        "if version_of(view) >= version:",
        "core/test_gradients.py::test_grad_input_of_one_in_place_module_after_another",
    ),
    Mutant(
        "core/hooks/tensors.py",
        "source.hook(hook, path, when=lambda: version_of(alias) != version)",
        "source.hook(hook, path, when=lambda: version_of(alias) == version)",
        "core/test_gradients.py::test_views_that_are_overwritten_have_the_gradients_of_what_was_there",
    ),
    Mutant(
        "core/model_state.py",
        "module.training = True",
        "module.training = False",
        "explain/test_top_examples.py::test_the_model_is_in_eval_mode_for_the_time",
    ),
    Mutant(
        "core/model_state.py",
        "buffer.copy_(value)",
        "pass",
        "core/test_regressions.py::test_overhead_takes_keywords_and_leaves_buffers_alone",
    ),
    Mutant(
        "core/findings.py",
        "return not any(finding.severity >= self.fail_on for finding in self.findings)",
        "return not any(finding.severity > self.fail_on for finding in self.findings)",
        "rules/test_checking.py::test_a_report_fails_at_its_level_and_above",
    ),
    Mutant(
        "core/trees.py",
        "items = [*value[:key], item, *value[key + 1 :]]",
        "items = [*value[:key], item, *value[key:]]",
        "edits/test_edits.py::test_one_leaf_of_a_container_is_edited_and_the_rest_kept",
    ),
    # captures: what flowed
    Mutant(
        "captures/summary.py",
        'print(f"{name:<40} {format_parameter_count(count):<20} {format_parameter_count(trainable_of[path]):<20}")',
        'print(f"{name:<40} {format_parameter_count(0):<20} {format_parameter_count(trainable_of[path]):<20}")',
        "seeds/test_classic_manager.py::test_c08_helpers",
    ),
    Mutant(
        "captures/summary.py",
        "count /= 1000",
        "count /= 1024",
        "seeds/test_classic_manager.py::test_c08_helpers",
    ),
    Mutant(
        "captures/hook_manager.py",
        "del self.features[: -self.max_size]",
        "del self.features[self.max_size :]",
        "seeds/test_classic_manager.py::test_c01_manager_keeps_the_newest_values_per_key",
    ),
    Mutant(
        "captures/trace.py",
        "milliseconds=(elapsed - began) * 1e3,",
        "milliseconds=(elapsed - began) * 1e6,",
        "seeds/test_capture_rows.py::test_c45_verbose_execution_a_line_a_layer",
    ),
    Mutant(
        "core/kept_gradients.py",
        "gradients.found[number] = copy(gradient)",
        "gradients.found[0] = copy(gradient)",
        "core/test_gradients.py::test_containers_keep_their_shape",
    ),
    Mutant(
        "captures/record.py",
        "gradients.found[event.leaf_number] = kept",
        "gradients.found[0] = kept",
        "core/test_gradients.py::test_containers_keep_their_shape",
    ),
    Mutant(
        "captures/agreement/rounding.py",
        "return torch.where(same, 0.0, (y - x).abs()).nan_to_num(nan=math.inf)",
        "return torch.where(same, 0.0, (y - x)).nan_to_num(nan=math.inf)",
        "captures/test_rounding.py::test_a_gap_is_as_wide_upwards_as_downwards",
    ),
    Mutant(
        "captures/appendable.py",
        "checksum = self._pool.submit(zlib.crc32, payload, self.crc32)",
        "checksum = self._pool.submit(zlib.crc32, payload, 0)",
        "seeds/test_tool_rows.py::test_b09_the_activations_of_a_data_set_where_it_was_interrupted",
    ),
    Mutant(
        "captures/pictures.py",
        "scaled = torch.where(high > low, (maps - low) / (high - low), 0.5)",
        "scaled = torch.where(high > low, (high - maps) / (high - low), 0.5)",
        "seeds/test_seeing_rows.py::test_c15_feature_maps_and_histograms_of_one_pass_in_tensorboard",
    ),
    Mutant(
        "captures/overhead.py",
        "return Overhead(plain, with_, runs)",
        "return Overhead(plain, 1.5 * plain, runs)",
        "seeds/test_capture_rows.py::test_c32_what_hooks_cost_on_this_model",
    ),
    Mutant(
        "captures/pictures.py",
        'return {"maps": picture(maps), "mean_map": picture(maps.double().mean(0, keepdim=True))}',
        'return {"maps": picture(maps), "mean_map": picture(maps.double()[:1])}',
        "seeds/test_seeing_rows.py::test_c15_feature_maps_and_histograms_of_one_pass_in_tensorboard",
    ),
    # stats: numbers
    Mutant(
        "stats/moments.py",
        'std=math.sqrt(row["m2"] / (n - 1)) if n > 1 else math.nan,',
        'std=2 * math.sqrt(row["m2"] / (n - 1)) if n > 1 else math.nan,',
        "seeds/test_measure_rows.py::test_b02_every_activation_gradient_weight_and_update_of_a_training",
    ),
    Mutant(
        "stats/moments.py",
        'zero_fraction=row["zeros"] / count if count else math.nan,',
        'zero_fraction=1 - row["zeros"] / count if count else math.nan,',
        "seeds/test_measure_rows.py::test_c17_statistics_by_layer",
    ),
    Mutant(
        "stats/kernels/plain.py",
        "m4 + 4 * d * m3 + 6 * d**2 * m2 + n * d**4,",
        "m4 + 4 * d * m3 + 4 * d**2 * m2 + n * d**4,",
        "stats/test_moments_property.py::test_however_it_is_split_and_merged",
    ),
    Mutant(
        "stats/kernels/gpu.cu",
        "zeros += 2 * below + (int(-counts) >> 16);",
        "zeros += 2 * below;",
        "stats/test_gpu_kernels_emulated.py::test_every_number_of_half_precision",
    ),
    Mutant(
        "stats/kernels/gpu.cu",
        "if (!quickly(x, places[blockIdx.x], found, also)) found = carefully(x);",
        "if (!quickly(x, places[blockIdx.x], found, also)) found = carefully(x), x.each(also);",
        "stats/test_gpu_kernels_emulated.py::test_every_number_of_half_precision",
    ),
    Mutant(
        "stats/cell.py",
        "for stat, state in self._others if done else self._pairs:",
        "for stat, state in self._pairs:",
        "stats/test_moments_with_bins.py::test_one_read_in_any_order_and_among_others",
    ),
    Mutant(
        "stats/channels.py",
        "(m2 / (n - 1)).sqrt().masked_fill(n < 2, torch.nan),",
        "(m2 / n).sqrt().masked_fill(n < 2, torch.nan),",
        "stats/test_other_stats.py::test_units_are_where_the_module_has_them",
    ),
    Mutant(
        "stats/histogram.py",
        "wanted = q * (float(below[-1]) - 1) + 0.5",
        "wanted = q * (float(below[-1]) - 1) + 1.5",
        "stats/test_histogram_property.py::test_a_quantile_lies_in_the_bin_of_the_true_one",
    ),
    Mutant(
        "stats/limits.py",
        "state[1] += ((x < low) | (x > high)).sum(1)",
        "state[1] += ((x < low) | (x > high)).sum()",
        "stats/test_limits_and_attention.py::test_saturation_is_the_part_at_the_ends_by_unit",
    ),
    # edits: what flows on
    Mutant(
        "edits/basic.py",
        "return partly(x, x + self.like(x), self.where)",
        "return partly(x, x - self.like(x), self.where)",
        "seeds/test_edit_rows.py::test_b06_one_selection_language_for_ablating_patching_steering_and_clipping",
    ),
    Mutant(
        "edits/ablation.py",
        "mask = torch.tensor([index in indices for index in range(count)], device=x.device).repeat_interleave(times)",
        "mask = torch.tensor([index in chosen for index in range(count)], device=x.device).repeat_interleave(times)",
        "seeds/test_edit_rows.py::test_b06_one_selection_language_for_ablating_patching_steering_and_clipping",
    ),
    Mutant(
        "edits/ablation.py",
        "indices = [index % count for index in chosen]",
        "indices = [index for index in range(count) if index not in chosen]",
        "seeds/test_edit_rows.py::test_b06_one_selection_language_for_ablating_patching_steering_and_clipping",
    ),
    Mutant(
        "edits/ablation.py",
        "return x.dim() - 1 - self.spatial",
        "return x.dim() - self.spatial",
        "edits/test_edit_regressions.py::test_channels_are_where_the_module_puts_them",
    ),
    Mutant(
        "edits/patching.py",
        "return values[call]",
        "return values[-1]",
        "edits/test_edits.py::test_ablation_with_a_capture_takes_the_same_site_and_call",
    ),
    Mutant(
        "edits/sweep.py",
        'return (value - baseline) / (clean - baseline) if clean != baseline else float("nan")',
        'return (value - baseline) / (baseline - clean) if clean != baseline else float("nan")',
        "edits/test_sweep.py::test_activation_patching",
    ),
    Mutant(
        "edits/edit_model.py",
        "clipped = gradient * (self.limit / length).clamp(max=1.0).to(gradient.dtype)",
        "clipped = gradient * (self.limit / length).to(gradient.dtype)",
        "seeds/test_edit_rows.py::test_c47_gradient_clipping_by_hooks_by_value_and_by_norm",
    ),
    # rules: what is wrong
    Mutant(
        "rules/families/gradients.py",
        "return {paths[n - 1]: max(values[:n]) / max(values[n:]) for n in range(1, most + 1)}",
        "return {paths[n - 1]: min(values[:n]) / max(values[n:]) for n in range(1, most + 1)}",
        "rules/test_each_rule.py::test_it_is_not_found_where_it_is_not[TH401-a_branch_that_counts_little]",
    ),
    Mutant(
        "rules/families/gradients.py",
        "ratio, value = 1e3, 0.01",
        "ratio, value = 2.0, 0.01",
        "seeds/test_diagnosis_rows.py::test_c22_exploding_and_vanishing_gradients_are_found",
    ),
    Mutant(
        "rules/families/gradients.py",
        "size, beside = 1e3, 10.0",
        "size, beside = 2.0, 10.0",
        "rules/test_each_rule.py::test_it_is_not_found_where_it_is_not[TH402-gradients_that_are_larger_than_usual]",
    ),
    Mutant(
        "rules/families/gradients.py",
        "splits = {path: max(split, by_sums[path]) for path, split in self.splits(self.norms(history)).items()}",
        "splits = self.splits(self.norms(history))",
        "seeds/test_diagnosis_rows.py::test_c22_a_mean_over_very_many_positions_is_no_vanishing_gradient",
    ),
    Mutant(
        "rules/families/units.py",
        "found[reading.path] = fires < self.active, fires",
        "found[reading.path] = fires > self.active, fires",
        "seeds/test_diagnosis_rows.py::test_c21_dead_units_are_found",
    ),
    Mutant(
        "rules/series.py",
        "limit = max(math.log(factor), 6 * 1.4826 * median(abs(level - centre) for level in before))",
        "limit = 6 * 1.4826 * median(abs(level - centre) for level in before)",
        "rules/test_series.py::test_an_outlier_is_far_above_by_factor_and_by_deviation",
    ),
    Mutant(
        "rules/causes.py",
        "return first is None or second is None or first <= second",
        "return first is None or second is None or first >= second",
        "rules/test_folding.py::test_what_came_before_is_no_consequence",
    ),
    Mutant(
        "rules/causes.py",
        "return -finding.severity.rank, _step(finding), -place if rule.backward else place",
        "return -finding.severity.rank, _step(finding), place",
        "rules/test_folding.py::test_the_last_is_the_root_of_what_travels_with_gradients",
    ),
    Mutant(
        "rules/profile.py",
        "more = total / (total - some)",
        "more = 1.0",
        "rules/test_profile.py::test_how_far_batches_are_apart_is_their_distance_from_the_rest",
    ),
    Mutant(
        "rules/trials.py",
        "return fmean(gains) > max(share * abs(plain.at(step)), least, error)",
        "return fmean(gains) > 0",
        "rules/test_trials.py::test_a_repair_helps_if_the_loss_is_clearly_lower_with_it",
    ),
    Mutant(
        "rules/trials.py",
        "gains = [a - b for a, b in zip(plain.best(step), repaired.best(step), strict=True)]",
        "gains = [b - a for a, b in zip(plain.best(step), repaired.best(step), strict=True)]",
        "seeds/test_diagnosis_rows.py"
        "::test_b13_the_repair_of_a_finding_is_tried_on_a_copy_and_the_finding_says_what_the_loss_did_then",
    ),
    # render: what is said
    Mutant(
        "render/to_junit.py",
        "failing = [finding for finding in found if finding.severity >= report.fail_on]",
        "failing = [finding for finding in found if finding.severity > report.fail_on]",
        "seeds/test_diagnosis_rows.py::test_b11_one_report_for_people_and_machines",
    ),
    Mutant(
        "render/to_junit.py",
        '"failures": str(len(suite.findall("testcase/failure"))),',
        '"failures": "0",',
        "seeds/test_diagnosis_rows.py::test_b11_one_report_for_people_and_machines",
    ),
    Mutant(
        "render/to_json.py",
        '_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}',
        '_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": math.inf}',
        "render/test_render_json.py::test_numbers_that_are_not_finite_come_back_as_numbers_but_as_words_in_the_evidence",
    ),
    Mutant(
        "render/figures/layers.py",
        "inside = [value is None or low <= value <= high for value in values]",
        "inside = [value is None or value <= high for value in values]",
        "render/test_report_plots.py::test_updates_outside_of_the_band_differ_in_shape_and_colour",
    ),
    Mutant(
        "render/figures/curves.py",
        "height = points[min(bisect_left(points, (step,)), len(points) - 1)][1]",
        "height = points[0][1]",
        "render/test_report_plots.py::test_findings_are_marked_on_the_curve",
    ),
    Mutant(
        "render/to_markdown.py",
        'return "\\n".join([*kept, "", _more(len(items) - len(kept))])',
        'return "\\n".join([*kept, "", _more(len(kept))])',
        "render/test_render_markdown.py::test_it_always_fits_a_job_summary",
    ),
    # training: what a run keeps
    Mutant(
        "rules/model_diagnostics.py",
        'images = self.features if hasattr(writer, "add_image") else {}',
        "images = {}",
        "seeds/test_seeing_rows.py::test_c15_feature_maps_and_histograms_of_one_pass_in_tensorboard",
    ),
    Mutant(
        "training/runs/fields.py",
        '"l2": lambda row: _known(row, (row.m2 + row.n * row.mean * row.mean).sqrt()),',
        '"l2": lambda row: _known(row, row.m2.sqrt()),',
        "training/runs/test_run_store.py::test_fields_are_those_of_the_statistic",
    ),
    Mutant(
        "training/runs/queries.py",
        "return [*spread(steps[:-1], most - 1), steps[-1]]",
        "return spread(steps, most)",
        "training/runs/test_run_store.py::test_a_series_is_what_the_windows_say",
    ),
    Mutant(
        "training/maps.py",
        "self.latest[path] = value.detach()[0, :_CHANNELS].clone()",
        "self.latest[path] = value.detach()[-1, :_CHANNELS].clone()",
        "seeds/test_tool_rows.py::test_c15_feature_maps_and_histograms_of_a_training_in_tensorboard",
    ),
    Mutant(
        "training/judge.py",
        "if key not in self.seen and (key in before or last or _is_urgent(found))",
        "if key not in self.seen and (key in before or last)",
        "training/test_monitor.py::test_what_explains_a_broken_loss_is_told_at_once",
    ),
    Mutant(
        "training/monitor.py",
        "if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):",
        "if error is None or isinstance(error, SystemExit):",
        "training/test_monitor.py::test_how_the_training_ended_is_written_with_all_that_was_seen",
    ),
    # plot: what is drawn
    Mutant(
        "plot/images.py",
        "return (0.5 + 0.5 * some / reach(some)).clamp(0, 1)",
        "return (0.5 - 0.5 * some / reach(some)).clamp(0, 1)",
        "plot/test_stills_images.py::test_zero_is_white_among_both_signs_and_darkest_above_zero",
    ),
    Mutant(
        "plot/images.py",
        "broken = F.max_pool2d((~maps.isfinite()).double()[:, None], stride, ceil_mode=True)[:, 0] > 0",
        "broken = F.max_pool2d((~maps.isfinite()).double()[:, None], stride, ceil_mode=True)[:, 0] > 1",
        "plot/test_stills_images.py::test_one_broken_pixel_of_a_large_map_is_not_thinned_away",
    ),
    Mutant(
        "plot/mosaic.py",
        "row, column = divmod(number, self.columns)",
        "column, row = divmod(number, self.rows)",
        "seeds/test_seeing_rows.py::test_c16_feature_maps_as_pictures",
    ),
    Mutant(
        "plot/mosaic.py",
        "pixels = colour(values.numpy(), bytes=True)",
        "pixels = colour(0 * values.numpy(), bytes=True)",
        "seeds/test_seeing_rows.py::test_c16_feature_maps_as_pictures",
    ),
    Mutant(
        "plot/images.py",
        "maps = torch.cat([whole.mean(0, keepdim=True), channels])[-len(names) :]",
        "maps = torch.cat([whole[:1], channels])[-len(names) :]",
        "seeds/test_seeing_rows.py::test_c16_feature_maps_as_pictures",
    ),
    Mutant(
        "plot/layers.py",
        "ax.plot([size for size, _ in shown], [row for _, row in shown], **style)",
        "ax.plot([1.0 for size, _ in shown], [row for _, row in shown], **style)",
        "seeds/test_seeing_rows.py::test_c19_gradients_are_watched_and_plotted_by_layer",
    ),
    Mutant(
        "plot/cams.py",
        "return [_Map(_plane(one), target, unit, heat.size) for one, target in zip(heat.maps, heat.target, strict=True)]",
        "return [_Map(0 * _plane(one), target, unit) for one, target in zip(heat.maps, heat.target, strict=True)]",
        "plot/test_stills_images.py::test_heat_without_an_image_is_drawn_alone_in_pixels_of_the_input",
    ),
    Mutant(
        "plot/arrays.py",
        "return float(known[round(share * (len(known) - 1))]) if len(known) else 0.0",
        "return float(known[-1]) if len(known) else 0.0",
        "plot/test_stills_images.py::test_each_map_has_its_own_scale_which_an_outlier_does_not_stretch",
    ),
    Mutant(
        "plot/layers.py",
        "return [2 * steps[0] - between[0], *between, 2 * steps[-1] - between[-1]]",
        "return [steps[0], *between, steps[-1]]",
        "plot/test_stills_layers.py::test_a_series_is_drawn_by_layer_and_step",
    ),
    Mutant(
        "plot/spread.py",
        "quantiles = tuple(bins.quantile(q) for q in (0.01, 0.25, 0.5, 0.75, 0.99))",
        "quantiles = tuple(bins.quantile(q) for q in (0.01, 0.05, 0.5, 0.95, 0.99))",
        "plot/test_stills_layers.py::test_boxes_are_quantiles",
    ),
    # explain: what a model looks at
    Mutant(
        "explain/cams.py",
        'return torch.einsum("nc,nchw->nhw", weights, maps)',
        'return 0 * torch.einsum("nc,nchw->nhw", weights, maps)',
        "seeds/test_seeing_rows.py::test_c27_grad_cam_and_its_family_are_what_the_papers_say",
    ),
    Mutant(
        "explain/pyramids.py",
        "strength, rms = _mean(energy, real), math.sqrt(_mean(square, real))",
        "strength, rms = 2 * _mean(energy, real), math.sqrt(_mean(square, real))",
        "seeds/test_seeing_rows.py::test_c37_a_weak_level_of_a_detector_is_named",
    ),
    Mutant(
        "explain/cams.py",
        "return (gradient * maps).sum(1)",
        "return (gradient - maps).sum(1)",
        "seeds/test_seeing_rows.py::test_c27_grad_cam_lies_on_what_the_class_is_of",
    ),
    Mutant(
        "explain/cams.py",
        "return torch.where(along < 0, -projected, projected).view(-1, *maps.shape[2:]).to(maps.dtype)",
        "return projected.view(-1, *maps.shape[2:]).to(maps.dtype)",
        "explain/test_cams.py::test_eigen_cam_is_the_first_principal_component_with_a_sign",
    ),
    Mutant(
        "explain/erasure.py",
        "mixed = torch.where(first == back, self.images[rows], self.base[rows])",
        "mixed = torch.where(first != back, self.images[rows], self.base[rows])",
        "explain/test_faithfulness.py::test_the_true_map_of_a_linear_score_has_the_closed_form",
    ),
    Mutant(
        "explain/pyramids.py",
        "moved = (box * torch.tensor([scale[1], scale[0], scale[1], scale[0]])).tolist()",
        "moved = box.tolist()",
        "explain/test_pyramid.py::test_boxes_follow_what_a_detector_does_to_an_image",
    ),
    Mutant(
        "explain/pyramids.py",
        "outside[number] = outside[number].minimum((real[number] - cover).clamp(min=0))",
        "pass",
        "explain/test_pyramid.py::test_maps_that_are_one_inside_the_box",
    ),
    Mutant(
        "explain/cams.py",
        "return weighted(maps, gradient.mean((2, 3)))",
        "return weighted(0 * maps, gradient.mean((2, 3)))",
        "seeds/test_seeing_rows.py::test_c27_grad_cam_and_its_family_are_what_the_papers_say",
    ),
    Mutant(
        "explain/pyramids.py",
        "energy, square = maps.abs().mean(1), maps.square().mean(1)",
        "energy, square = maps.mean(1), maps.square().mean(1)",
        "seeds/test_seeing_rows.py::test_c37_a_weak_level_of_a_detector_is_named",
    ),
    # compare: two of a kind
    Mutant(
        "compare/measures.py",
        "return trace + ones_x * ones_y / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)",
        "return trace + ones_x * ones_y / ((n - 1) * (n - 2)) - rows / (n - 2)",
        "compare/test_measures.py::test_unbiased_estimate_equals_its_formula_both_ways",
    ),
    Mutant(
        "compare/distances.py",
        "return float((shift + x.square().sum() + y.square().sum() - 2 * root).clamp(min=0))",
        "return float((x.square().sum() + y.square().sum() - 2 * root).clamp(min=0))",
        "seeds/test_comparing_rows.py::test_c29_distance_between_two_domains_at_a_layer",
    ),
    Mutant(
        "compare/distances.py",
        "return (1 + beyond) / (1 + permutations)",
        "return beyond / permutations",
        "seeds/test_comparing_rows.py::test_c29_distance_between_two_domains_at_a_layer",
    ),
    Mutant(
        "compare/auc.py",
        "both = torch.searchsorted(order, of, right=False) + torch.searchsorted(order, of, right=True)",
        "both = 2 * torch.searchsorted(order, of, right=True)",
        "compare/test_leakage.py::test_auc_and_true_positives_are_those_of_scikit_learn",
    ),
    Mutant(
        "compare/distributions.py",
        "return (other_mean - mean) / ((before + after) / 2).sqrt(), after / before",
        "return (mean - other_mean) / ((before + after) / 2).sqrt(), after / before",
        "compare/test_spreads.py::test_distances_and_shifts_are_those_of_the_values",
    ),
    Mutant(
        "compare/distributions.py",
        "return Worst.of(self.ranked(), self.compared, k)",
        "return Worst.of(self.ranked()[::-1], self.compared, k)",
        "seeds/test_comparing_rows.py::test_c36_the_parameters_of_the_layers_that_differ_most",
    ),
    Mutant(
        "compare/layer_pairs.py",
        "return first[paths[i]] == second[others[j]]",
        "return True",
        "seeds/test_comparing_rows.py::test_c18_different_architectures_are_paired_by_role_and_order",
    ),
    Mutant(
        "compare/pairwise.py",
        "matrix[i, j] = self.measure.joint(own[0][i], own[1][j], self.moments.pair(x, y))",
        "matrix[i, j] = 0.0",
        "seeds/test_comparing_rows.py::test_c41_different_architectures_through_one_interface",
    ),
    Mutant(
        "compare/layer_samples.py",
        "return torch.as_tensor(self._sum / self.seen)",
        "return torch.as_tensor(self._sum)",
        "seeds/test_comparing_rows.py::test_c29_the_share_of_each_layer_in_the_distance_of_the_means",
    ),
    Mutant(
        "compare/membership_signals.py",
        'self._score("loss", -found.losses)',
        'self._score("loss", found.losses)',
        "seeds/test_comparing_rows.py::test_c42_where_a_model_may_leak_what_it_was_trained_on",
    ),
    # prune: what matters least
    Mutant(
        "prune/scores.py",
        "return self.sums[path] / (n * self.power)",
        "return self.sums[path] / self.power",
        "seeds/test_comparing_rows.py::test_c28_importance_and_pruning_that_really_removes_channels",
    ),
    Mutant(
        "prune/scores.py",
        "scale = scale / (norm.running_var.double() + norm.eps).sqrt()",
        "scale = scale * (norm.running_var.double() + norm.eps).sqrt()",
        "prune/test_importance.py::test_l1_wanda_activation_and_apoz_by_their_formulas",
    ),
    Mutant(
        "prune/planner.py",
        "return sorted(units)",
        "return sorted(units, reverse=True)",
        "seeds/test_comparing_rows.py::test_c28_importance_and_pruning_that_really_removes_channels",
    ),
    Mutant(
        "prune/planner.py",
        "share *= 1 - inputs.get(path, 0) / inputs_of(layer)",
        "share *= 1",
        "prune/test_pruning.py::test_flops_are_enough_and_not_one_channel_more",
    ),
    Mutant(
        "prune/surgery.py",
        "totals[number] += float(guess.loss.detach()) * count",
        "totals[number] += float(guess.loss.detach())",
        "seeds/test_comparing_rows.py::test_c28_importance_and_pruning_that_really_removes_channels",
    ),
    # activations: a data set on disk
    Mutant(
        "activations/column.py",
        "return torch.where(found < 0, found + count, found)",
        "return torch.where(found < 0, -found, found)",
        "activations/test_harvest_reading.py::test_any_rows_are_those_of_all_shards_together",
    ),
    Mutant(
        "activations/column.py",
        "return self._samples.ids[places], numbers - self._sample_starts[places]",
        "return self._samples.ids[places], numbers",
        "activations/test_harvest_reading.py::test_keys_of_rows",
    ),
    Mutant(
        "activations/batches.py",
        "stop = torch.minimum(start + self.rows, torch.tensor(self.lengths)[part])",
        "stop = start + self.rows",
        "activations/test_harvest_shuffling.py::test_mixed_batches_are_a_permutation",
    ),
    Mutant(
        "activations/collector.py",
        "valid = mask.cpu() != 0",
        "valid = mask.cpu() == 0",
        "activations/test_harvest_whole.py::test_tokens_without_padding_of_all_calls_of_a_layer",
    ),
    Mutant(
        "activations/collector.py",
        "stored = stored.clone()",
        "pass",
        "activations/test_harvest_whole.py::test_what_a_later_layer_overwrites_is_kept_as_it_flowed",
    ),
    Mutant(
        "compare/recordings/writer.py",
        "arriving = self._transfer(tensor.clone())",
        "arriving = self._transfer(tensor)",
        "compare/recordings/test_record.py::test_no_copy_on_write_goes_to_the_writing_thread",
    ),
    # dashboard: runs in the browser
    Mutant(
        "dashboard/page.py",
        'said = Moments().of(numbers(layer.values, "what"))',
        'said = Moments().of(0 * numbers(layer.values, "what"))',
        "seeds/test_seeing_rows.py::test_c35_what_one_has_is_shown_without_a_training",
    ),
    Mutant(
        "dashboard/sheets.py",
        "return _rows(self.series.values.T[first:])",
        "return _rows(self.series.values.T[first + 1 :])",
        "dashboard/test_dashboard_data.py::test_numbers_are_those_of_the_run",
    ),
    Mutant(
        "dashboard/sheets.py",
        "worst[found.site] = max(worst.get(found.site, found.severity), found.severity, key=lambda one: one.rank)",
        "worst[found.site] = min(worst.get(found.site, found.severity), found.severity, key=lambda one: one.rank)",
        "dashboard/test_dashboard_data.py::test_health_is_the_worst_of_what_was_found_and_of_what_comes_of_it",
    ),
    Mutant(
        "dashboard/guard.py",
        'return None if name in HERE else ("This page is only available on this machine; see --host.", 403)',
        "return None",
        "dashboard/test_dashboard_guard.py::test_a_page_whose_name_was_made_to_lead_here_reads_nothing",
    ),
    Mutant(
        "dashboard/guard.py",
        "return Guard(token if host in HERE else token or secrets.token_urlsafe(24))",
        "return Guard(token)",
        "dashboard/test_dashboard_guard.py::test_beyond_this_machine_a_token_is_made",
    ),
    Mutant(
        "dashboard/folding.py",
        "skips = [source for source in earlier if reached >> place[source] & 1]",
        "skips = earlier",
        "dashboard/test_model_folding.py::test_branches_all_stay",
    ),
    # integrations: other tools
    Mutant(
        "integrations/common.py",
        "every = 2 ** max(0, math.ceil(math.log2(len(self._numbers) / MOST))) if matching else 1",
        "every = 1",
        "integrations/test_tensorboard_log.py::test_a_thousand_layers_are_thinned_out_evenly_and_for_good",
    ),
    Mutant(
        "integrations/tensorboard.py",
        "total, squares = moments.mean * (moments.count - moments.nonfinite), moments.l2**2",
        "total, squares = moments.mean * moments.count, moments.l2**2",
        "integrations/test_tensorboard_log.py::test_histograms_are_right_and_short",
    ),
    Mutant(
        "integrations/tensorboard.py",
        'self._writer.add_scalar("torchhook/loss", loss, step, entry.time)',
        'self._writer.add_scalar("torchhook/loss", loss, entry.step, entry.time)',
        "integrations/test_tensorboard_log.py::test_the_loss_has_every_step",
    ),
    Mutant(
        "integrations/lightning.py",
        "return parts.mean() * trainer.accumulate_grad_batches if pl_module.automatic_optimization else parts.sum()",
        "return parts.mean() if pl_module.automatic_optimization else parts.sum()",
        "integrations/test_lightning_callback.py::test_a_loss_is_told_as_it_was_before_it_was_scaled",
    ),
    Mutant(
        "integrations/pytest_plugin.py",
        "if not report.ok:",
        "if report.findings:",
        "integrations/test_pytest_plugin.py::test_what_is_not_bad_enough_is_told_at_the_end",
    ),
    # cli: commands
    Mutant(
        "cli/diagnose.py",
        "raise typer.Exit(report.exit_code)",
        "raise typer.Exit(0)",
        "cli/test_cli_diagnose.py::test_ends_with_1_if_something_is_found",
    ),
    Mutant(
        "cli/diff.py",
        "raise typer.Exit(1 if not found.same else 0 if found.complete else 2)",
        "raise typer.Exit(1 if found.same else 0)",
        "cli/test_diff_command.py::test_ends_with_0_if_they_are_the_same",
    ),
    Mutant(
        "cli/loaders.py",
        "return [word.upper() if word[-1:].isdigit() else word for word in words if word]",
        "return [word.upper() for word in words if word]",
        "cli/test_cli_loading.py::test_codes_come_at_once_or_one_by_one",
    ),
    Mutant(
        "cli/explain.py",
        "x = (shown - torch.tensor(centre).view(3, 1, 1)) / torch.tensor(spread).view(3, 1, 1)",
        "x = (shown - torch.tensor(centre).view(3, 1, 1)) * torch.tensor(spread).view(3, 1, 1)",
        "cli/test_explain_command.py::test_a_model_is_given_colours_less_the_mean_in_units_of_the_deviation",
    ),
    Mutant(
        "cli/runs.py",
        "return [run.name, run.model, run.state, _date(run.started), last, findings, size, run.error]",
        "return [run.name, run.model, run.state, _date(run.started), len(run.losses), findings, size, run.error]",
        "cli/test_runs_commands.py::test_lists_the_runs_on_a_line_each",
    ),
    # contracts
    Mutant(
        "rules/contracts/pairings.py",
        "cuts += [Cut(0, stop, count), Cut(0, stop, length, inside=False)]",
        "cuts += [Cut(0, length, count)]",
        "rules/contracts/test_pairings.py::test_positions_that_are_flattened_are_taken_apart",
    ),
    Mutant(
        "rules/contracts/positions.py",
        "return torch.full(sizes, int(not mask.real)).to(x)",
        "return torch.full(sizes, int(mask.real)).to(x)",
        "rules/contracts/test_planted.py::test_nothing_is_said_of_its_healthy_twin[bert_averages_padding]",
    ),
    Mutant(
        "rules/contracts/caching.py",
        "start = 0 if is_mask else begin",
        "start = begin",
        "rules/contracts/test_pairings.py::test_a_mask_covers_the_cache",
    ),
    Mutant(
        "rules/contracts/caching.py",
        "for number in range(1, len(stops) - 1):",
        "for number in (1, len(stops) - 2):",
        "rules/contracts/test_planted.py::test_what_is_planted_is_found_at_its_module[writer_rolls_its_window_early]",
    ),
    Mutant(
        "rules/contracts/case.py",
        "with state_kept(model), attributes_kept(model), self._evaluating(model), variant.within():",
        "with state_kept(model), self._evaluating(model), variant.within():",
        "rules/contracts/test_planted.py"
        "::test_what_is_planted_is_found_at_its_module[smoothing_goes_on_from_batch_to_batch]",
    ),
    Mutant(
        "rules/contracts/switches.py",
        "acting = dict.fromkeys((*random_modules(case, variant), *map(owner, _written(case, variant))))",
        "acting = dict.fromkeys(random_modules(case, variant))",
        "rules/contracts/test_healthy.py::test_nothing_is_said_of[batch_norm_by_hand]",
    ),
    Mutant(
        "rules/contracts/samples.py",
        "for number in reversed(range(count)):",
        "for number in (count - 1,):",
        "rules/contracts/test_verify.py::test_every_sample_is_compared_and_the_reverse_order[both_of_the_middle]",
    ),
    Mutant(
        "rules/contracts/parameters.py",
        "_DRAWS = 3",
        "_DRAWS = 0",
        "rules/contracts/test_healthy.py::test_nothing_is_said_of[a_correction_that_is_zero_at_first]",
    ),
    Mutant(
        "captures/agreement/free_runs.py",
        "suspects = [one for one in suspects if not agreed.intersection(_around(one.location))]",
        "suspects = list(suspects)",
        "rules/contracts/test_planted.py::test_what_is_planted_is_found_at_its_module[mixtral_shares_its_tokens]",
    ),
    # recordings
    Mutant(
        "compare/recordings/writer.py",
        "if where is not None and known == state:",
        "if where is not None:",
        "compare/recordings/test_record.py::test_values_are_those_that_flowed",
    ),
    Mutant(
        "compare/recordings/files.py",
        "if math.prod(field.shape) * dtype.itemsize != end - begin:",
        "if False:",
        "compare/recordings/test_hostile_recordings.py::test_tensors_that_do_not_fit_their_file",
    ),
    Mutant(
        "compare/recordings/sketch.py",
        "columns = [self.sums[:, place.start // GROUP : math.ceil(place.stop / GROUP)] for place in places]",
        "columns = [self.sums[:, : math.ceil((place.stop - place.start) / GROUP)] for place in places]",
        "compare/recordings/test_maps.py::test_projections_that_are_interleaved_by_head[sketch]",
    ),
    Mutant(
        "compare/recordings/ranks.py",
        "whole.observations.pop(location, None)",
        "pass",
        "compare/recordings/test_record.py::test_ranks_that_only_have_stages_of_a_pipeline_are_put_together",
    ),
    Mutant(
        "compare/diff/fused.py",
        "shape = (-1, 2, size // 2) if interleave else (-1, size // 2, 2)",
        "shape = (-1, size // 2, 2) if interleave else (-1, 2, size // 2)",
        "compare/recordings/test_maps.py::test_halves_that_are_interleaved_for_rotary_positions",
    ),
    Mutant(
        "compare/diff/updates.py",
        "explained = _SLACK * (epsilon + gap(before, start).error) * size + _SIGNS * math.sqrt(max(gradient, epsilon))",
        "explained = _SLACK * (epsilon + gap(before, start).error) * size",
        "compare/recordings/test_recorded_steps.py::test_rounding_that_grows_from_step_to_step_is_no_difference[sketch]",
    ),
    Mutant(
        "captures/agreement/file_judge.py",
        "return _MEASURED * max([1.0, *gains]) if gains else _GUESSED",
        "return _MEASURED",
        "compare/recordings/test_record.py::test_noise_makes_small_mistakes_visible",
    ),
    Mutant(
        "captures/agreement/choices.py",
        "if known.start is not None and 0 < share <= min(_MOST, _CLOSE * known.error):",
        "if known.start is not None and 0 < share:",
        "compare/recordings/test_choices.py::test_mistakes_where_experts_are_chosen_are_found[dtype0-all]",
    ),
    Mutant(
        "captures/agreement/recorded_run.py",
        "tensors=[observed.tensors[number] for number in numbers],",
        "tensors=observed.tensors,",
        "compare/recordings/test_record.py::test_callers_name_arguments_in_any_order",
    ),
    Mutant(
        "captures/agreement/formulas.py",
        "yield lambda x: F.linear(x.double(), weight.T, bias)",
        "yield lambda x: F.linear(x.double(), weight, bias)",
        "compare/recordings/test_maps.py::test_small_mistakes_after_large_rounding_errors_show_where_a_formula_fits",
    ),
]
