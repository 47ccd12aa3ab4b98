"""Deliberate faults in the code that needs no GPU, each of which a test must catch.

Most of their tests need no cluster. `make mutants` applies each fault to a copy of the
repository and runs its tests; `run.py` says how.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NUMBER = "tests/test_promised_values.py::test_a_number_is_that_of_its_page"
CLUSTER = "tests/test_promised_values.py::test_the_defaults_of_a_cluster"
ARGUMENT = "tests/test_promised_values.py::test_the_default_of_an_argument"
NEWEST = "tests/test_bounds.py::test_the_newest_are_kept"
CACHES = "tests/test_bounds.py::test_a_cache_begins_anew_at_its_bound"
VIEW = "tests/test_bounds.py::test_a_view_keeps_its_order_beyond_so_much_output"
ESCAPED = "tests/widgets/test_escaping.py::test_a_text_is_escaped"
OUTPUTS = "tests/widgets/test_kept_outputs.py"
OUTPUTS_LOCKED = f"{OUTPUTS}::test_the_cells_are_read_and_changed_with_the_lock"
COLLECTOR_LOCKED = (
    "tests/telemetry/test_collector.py::"
    "test_everything_is_read_and_changed_with_the_lock"
)
LOCKED = "tests/test_locks.py::test_everything_is_touched_with_the_lock"
FORKS = (
    "tests/clusters/test_fork_server_client.py::"
    "test_one_thread_at_a_time_uses_the_fork_server"
)
REGISTRY = "tests/clusters/test_rank_registry.py"
DEATH = f"{REGISTRY}::test_a_death_ends_the_requests_and_wakes_those_that_wait"
MAILBOX = "tests/collectives/test_mailbox.py"
COUNTED = f"{MAILBOX}::test_a_message_is_counted_at_both_ends"
SHORT = f"{MAILBOX}::test_a_short_message_is_an_error"
TICKET = f"{MAILBOX}::test_a_wait_that_is_ended_closes_the_ticket"
HANDLE = "tests/collectives/test_handle.py"
RECORDER = "tests/telemetry/test_recorder.py"
COLLECTOR = "tests/telemetry/test_collector.py"
SIGNED = "tests/ipc/test_signed_messages.py"
STALL = "tests/clusters/test_stall_detector.py::test_the_text_of_the_notice"
PLACEMENT = "tests/clusters/test_placement.py"
LINES = "tests/widgets/test_lines.py"
SEGMENT = "tests/collectives/test_shared_segment.py"
SEGMENT_LEAK = f"{SEGMENT}::test_a_segment_that_cannot_be_mapped_leaves_no_descriptor"
RANKS = "tests/test_rank_lists.py"
WORKER = (
    "tests/clusters/test_workers.py::"
    "test_half_a_line_is_shown_with_its_other_half_or_the_end"
)
AWAITED = (
    "tests/clusters/test_workers.py::"
    "test_a_worker_is_awaited_again_until_its_end_was_reported"
)
FURTHEST = (
    "tests/training/test_differences.py::"
    "test_the_largest_difference_of_all_ranks_is_shown"
)
COPIED = "tests/engine/test_copied_variables.py"
FLIGHT = "tests/collectives/test_flight_recorder.py"

KINDS: dict[str, list[Mutant]] = {
    "a default or a limit changed": [
        Mutant(
            "a stall is noticed after 30 s",
            "clusters/stall_detector.py",
            "NOTICE_AFTER_S = 10.0",
            "NOTICE_AFTER_S = 30.0",
            [NUMBER],
        ),
        Mutant(
            "a rank has 50 s to react to an interrupt",
            "clusters/call_supervisor.py",
            "INTERRUPT_GRACE_S = 5.0",
            "INTERRUPT_GRACE_S = 50.0",
            [NUMBER],
        ),
        Mutant(
            "the end of a killed rank is awaited for 6 s",
            "clusters/rank_registry.py",
            "KILL_TIMEOUT_S = 60.0",
            "KILL_TIMEOUT_S = 6.0",
            [NUMBER],
        ),
        Mutant(
            "80 ranks share a core",
            "clusters/placement.py",
            "RANKS_PER_CORE = 8",
            "RANKS_PER_CORE = 80",
            [NUMBER],
        ),
        Mutant(
            "too many ranks are started without being asked for",
            "config.py",
            '_setting(False, _SWITCH, "OVERSUBSCRIBE")',
            '_setting(True, _SWITCH, "OVERSUBSCRIBE")',
            [CLUSTER],
        ),
        Mutant(
            "a dead rank is not replaced by default",
            "config.py",
            '_setting("replace", _TEXT, "ON_FAILURE")',
            '_setting("stop", _TEXT, "ON_FAILURE")',
            [CLUSTER],
        ),
        Mutant(
            "calls are not compared by default",
            "config.py",
            '_setting(True, _SWITCH, "CHECK")',
            '_setting(False, _SWITCH, "CHECK")',
            [CLUSTER],
        ),
        Mutant(
            "10 MB of a rank's output reach the notebook",
            "config.py",
            '_setting(1.0, _NUMBER, "OUTPUT_CAP_MB")',
            '_setting(10.0, _NUMBER, "OUTPUT_CAP_MB")',
            [CLUSTER],
        ),
        Mutant(
            "workers are awaited for 10 minutes",
            "clusters/workers.py",
            "timeout_seconds: float | None = 60,",
            "timeout_seconds: float | None = 600,",
            [ARGUMENT],
        ),
        Mutant(
            "the ring begins at 1 MiB",
            "collectives/transports/mpi.py",
            "RING_FROM_BYTES = 1 << 16",
            "RING_FROM_BYTES = 1 << 20",
            [NUMBER],
        ),
        Mutant(
            "10,000 lines are shown before the rest is collapsed",
            "widgets/cell_view.py",
            "MOST_LINES = 1000",
            "MOST_LINES = 10_000",
            [NUMBER],
        ),
        Mutant(
            "a kernel keeps 2,000,000 cells",
            "widgets/cell_outputs.py",
            "MOST_ENDED = 20",
            "MOST_ENDED = 2_000_000",
            [f"{OUTPUTS}::test_the_last_ended_cells_are_kept_and_those_that_run"],
        ),
        Mutant(
            "a look at all variables takes as long as each may",
            "engine/inspection.py",
            "min(each_s, share_s))",
            "each_s)",
            [
                "tests/engine/test_variable_limits.py::"
                "test_a_variable_has_a_limit_and_a_share_of_that_of_all"
            ],
        ),
        Mutant(
            "the copy of variables has no limit for all",
            "engine/calls.py",
            "limit_s = min(left, VARIABLE_LIMIT_S)",
            "limit_s = VARIABLE_LIMIT_S",
            [f"{COPIED}::test_a_variable_has_a_limit_and_all_together_have_one"],
        ),
        Mutant(
            "a monitor waits without a limit",
            "widgets/pacing.py",
            "return min(wanted, LONGEST_S)",
            "return wanted",
            ["tests/widgets/test_pacing.py"],
        ),
        Mutant(
            "the limit of a container does not count",
            "ipc/resources.py",
            "return min(total, int(limit)) if limit.isdigit() else total",
            "return total",
            [
                "tests/ipc/test_resources.py::test_the_memory_limit_of_a_container_counts"
            ],
        ),
    ],
    "a lock left out": [
        Mutant(
            "subscribers are read without the lock",
            "telemetry/collector.py",
            "        with self._lock:\n            subscribers = list(",
            "        if True:\n            subscribers = list(",
            [COLLECTOR_LOCKED],
        ),
        Mutant(
            "a subscriber is added without the lock",
            "telemetry/collector.py",
            "        with self._lock:\n            self._subscribers.append(",
            "        if True:\n            self._subscribers.append(",
            [COLLECTOR_LOCKED],
        ),
        Mutant(
            "a mark is kept without the lock",
            "telemetry/collector.py",
            "        with self._lock:\n            self._keep_mark(Mark(",
            "        if True:\n            self._keep_mark(Mark(",
            [COLLECTOR_LOCKED],
        ),
        Mutant(
            "metrics are listed without the lock",
            "telemetry/collector.py",
            "        with self._lock:\n            return list(self._metrics)",
            "        return list(self._metrics)",
            [COLLECTOR_LOCKED],
        ),
        Mutant(
            "a kernel's output is published without the lock",
            "widgets/cell_outputs.py",
            "        with self._lock:\n            try:",
            "        if True:\n            try:",
            [OUTPUTS_LOCKED],
        ),
        Mutant(
            "a page gets the output without the lock",
            "widgets/cell_outputs.py",
            "        with self._lock:\n            for cell in",
            "        if True:\n            for cell in",
            [OUTPUTS_LOCKED],
        ),
        Mutant(
            "a cell is kept without the lock",
            "widgets/cell_outputs.py",
            "        with self._lock:\n            cell = "
            "self._cells.get(self._request_id())\n            if cell is None:",
            "        if True:\n            cell = "
            "self._cells.get(self._request_id())\n            if cell is None:",
            [OUTPUTS_LOCKED],
        ),
        Mutant(
            "what a cell has begun ends without the lock",
            "widgets/cell_outputs.py",
            "with self._lock:  # another thread",
            "if True:  # another thread",
            [f"{OUTPUTS}::test_what_a_cell_has_begun_ends_with_the_lock"],
        ),
        Mutant(
            "the fork server serves without the lock",
            "clusters/fork_server_client.py",
            "with _lock, socket.socket(socket.AF_UNIX) as listener:",
            "with socket.socket(socket.AF_UNIX) as listener:",
            [FORKS],
        ),
        Mutant(
            "the fork server is prepared without the lock",
            "clusters/fork_server_client.py",
            "    with _lock:\n        return _prepare(",
            "    if True:\n        return _prepare(",
            [FORKS],
        ),
        Mutant(
            "the fork server is awaited without the lock",
            "clusters/fork_server_client.py",
            "    with _lock:\n        return _server is not None and",
            "    if True:\n        return _server is not None and",
            [FORKS],
        ),
        Mutant(
            "a widget's message waits without the lock",
            "ipc/comm_queue.py",
            "        with self._lock:\n            if not _is_update(message):",
            "        if True:\n            if not _is_update(message):",
            [LOCKED],
        ),
        Mutant(
            "a record waits without the lock",
            "telemetry/recorder.py",
            "        with self._lock:\n            if not self._buffer:",
            "        if True:\n            if not self._buffer:",
            [LOCKED],
        ),
        Mutant(
            "a connection is added without the lock",
            "clusters/kept/server.py",
            "        with self._lock:\n            self._connections.append(",
            "        if True:\n            self._connections.append(",
            [LOCKED],
        ),
        Mutant(
            "what a notebook changes is noted without the lock",
            "clusters/kept/relayed_comms.py",
            "        with self._lock:\n            self._update(messages)",
            "        self._update(messages)",
            [LOCKED],
        ),
        Mutant(
            "a helper is forgotten without the lock",
            "clusters/supervisor_client.py",
            "        with self._lock:\n            self._helpers.pop(",
            "        if True:\n            self._helpers.pop(",
            [LOCKED],
        ),
    ],
    "a bound of memory removed": [
        Mutant(
            "every device sample is kept",
            "telemetry/collector.py",
            "deque(maxlen=DEVICE_HISTORY)",
            "deque()",
            [f"{NEWEST}[device samples of a rank]"],
        ),
        Mutant(
            "every mark is kept",
            "telemetry/collector.py",
            "deque(maxlen=MARKS_OF_A_KIND)",
            "deque()",
            [f"{NEWEST}[marks of a kind]"],
        ),
        Mutant(
            "every metric is kept",
            "telemetry/collector.py",
            " and len(self._metrics) < MAX_METRICS:",
            ":",
            [f"{COLLECTOR}::test_endless_metric_names_do_not_fill_the_memory"],
        ),
        Mutant(
            "a series is never made coarser",
            "telemetry/series.py",
            "while len(series) > self._capacity:",
            "while False:",
            [
                "tests/telemetry/test_series.py::"
                "test_a_history_is_bounded_and_keeps_mean_and_extremes"
            ],
        ),
        Mutant(
            "every record waits",
            "telemetry/recorder.py",
            "deque(maxlen=capacity)",
            "deque()",
            [f"{NEWEST}[records]"],
        ),
        Mutant(
            "every look is kept",
            "telemetry/time_split.py",
            "deque(maxlen=LOOKS)",
            "deque()",
            [f"{NEWEST}[looks]"],
        ),
        Mutant(
            "every failed call is kept",
            "collectives/handle.py",
            "collections.deque(maxlen=100)",
            "collections.deque()",
            [f"{NEWEST}[failed calls]"],
        ),
        Mutant(
            "every call of NCCL is kept",
            "collectives/torch_backend/native_calls.py",
            "deque(maxlen=_KEPT)",
            "deque()",
            [f"{NEWEST}[native calls]"],
        ),
        Mutant(
            "every handle of memory is kept",
            "collectives/sync/cuda_peers.py",
            "deque(maxlen=10_000)",
            "deque()",
            [f"{NEWEST}[memory handles]"],
        ),
        Mutant(
            "every timed call is kept",
            "collectives/call_timing.py",
            "deque(maxlen=MOST_PENDING)",
            "deque()",
            [f"{NEWEST}[timed calls]"],
        ),
        Mutant(
            "the errors of every tensor are kept",
            "collectives/transports/compressed_sum.py",
            "while len(self._residuals) > MOST_TENSORS:",
            "while False:",
            [f"{NEWEST}[errors of tensors]"],
        ),
        Mutant(
            "views of every length are kept",
            "collectives/transports/slots.py",
            "if len(cache) >= _CACHED_VIEWS:",
            "if False:",
            [CACHES],
        ),
        Mutant(
            "reductions of every length are kept",
            "collectives/transports/native.py",
            "if len(self.plans) >= _PLANS:",
            "if False:",
            [CACHES],
        ),
        Mutant(
            "every ended cell is kept",
            "session.py",
            "for number in ended[:-MOST_ENDED_CELLS]:",
            "for number in ():",
            [f"{NEWEST}[ended cells]"],
        ),
        Mutant(
            "every line of a long text is kept",
            "widgets/long_text.py",
            "deque(maxlen=SHOWN_LINES)",
            "deque()",
            [f"{NEWEST}[lines of a long text]"],
        ),
        Mutant(
            "a view keeps every line",
            "widgets/cell_view.py",
            "self._kept_items > MOST_KEPT_ITEMS or ",
            "",
            [VIEW],
        ),
        Mutant(
            "a view keeps lines of any size",
            "widgets/cell_view.py",
            " or self._kept_bytes > MOST_KEPT_BYTES",
            "",
            [VIEW],
        ),
        Mutant(
            "a cell's output is cut again and again",
            "widgets/cell_outputs.py",
            "        if self._characters > MOST_CHARACTERS:\n            return\n",
            "",
            ["tests/notebook/test_cell_outputs.py::test_a_cell_is_cleared_and_cut"],
        ),
        Mutant(
            "all silent connections stay open",
            "clusters/kept/server.py",
            "while len(self._connections) > MOST_SILENT:",
            "while False:",
            ["tests/test_bounds.py::test_of_many_silent_connections_the_oldest_end"],
        ),
        Mutant(
            "everything waits for a slow notebook",
            "clusters/kept/peer.py",
            "            if len(self._waiting) < MOST_WAITING:\n",
            "            if True:\n",
            [
                "tests/test_bounds.py::"
                "test_a_notebook_that_is_too_far_behind_is_disconnected"
            ],
        ),
        Mutant(
            "the numbers of all messages are kept",
            "ipc/signed_messages.py",
            "(kept | 1) & ((1 << WINDOW) - 1)",
            "kept | 1",
            [f"{SIGNED}::test_the_numbers_of_the_last_messages_are_kept"],
        ),
        Mutant(
            "a channel sends without credit",
            "ipc/channels.py",
            "            channel.credit -= len(data)\n",
            "",
            [
                "tests/ipc/test_channels.py::test_a_receiver_that_does_not_read_stops_its_own_channel_only"
            ],
        ),
    ],
    "a release that does not come": [
        Mutant(
            "a death wakes nobody",
            "clusters/rank_registry.py",
            "            self._lock.notify_all()\n",
            "",
            [DEATH],
        ),
        Mutant(
            "a death leaves its requests open",
            "clusters/rank_registry.py",
            "        self.client.fail(self._infos[rank].engine_uuid, error)\n",
            "",
            [DEATH],
        ),
        Mutant(
            "an interrupted message leaves its ticket open",
            "collectives/mailbox.py",
            "may still write to the tensor\n"
            "            self.hooks.on_end(self._ticket, False)\n",
            "may still write to the tensor\n",
            [TICKET],
        ),
        Mutant(
            "a released message leaves its ticket open",
            "collectives/mailbox.py",
            "CollectiveMismatch):\n"
            "            self.hooks.on_end(self._ticket, False)\n",
            "CollectiveMismatch):\n",
            [TICKET],
        ),
        Mutant(
            "an ended wait seems to go on",
            "collectives/mailbox.py",
            "            self.hooks.on_wait(None)\n",
            "            pass\n",
            [TICKET],
        ),
        Mutant(
            "the end of a call wakes no wait",
            "collectives/handle.py",
            "            self._ended = True\n            self._news.put(None)\n",
            "            self._ended = True\n",
            [f"{HANDLE}::test_all_threads_that_wait_for_a_call_see_its_end"],
        ),
        Mutant(
            "the end of a call wakes one wait",
            "collectives/handle.py",
            "self._news.put(None)  # wakes the next thread that waits",
            "pass",
            [f"{HANDLE}::test_all_threads_that_wait_for_a_call_see_its_end"],
        ),
        Mutant(
            "a flush is not told that the records were sent",
            "telemetry/recorder.py",
            "            self._settled.notify_all()\n",
            "",
            [f"{RECORDER}::test_a_flush_is_told_of_the_records_that_were_sent"],
        ),
        Mutant(
            "the last rank leaves the gate closed",
            "ipc/fork_server.py",
            "                os.close(self._writer)\n\n    def added_to",
            "                pass\n\n    def added_to",
            ["tests/ipc/test_fork_gate.py"],
        ),
        Mutant(
            "the end of a connection does not cross the stream",
            "ipc/channels.py",
            "            self._send(EOF, channel.number)\n",
            "",
            [
                "tests/ipc/test_channels.py::"
                "test_the_end_of_a_connection_reaches_the_other_end"
            ],
        ),
        Mutant(
            "a rank whose peer has ended is not released",
            "clusters/call_supervisor.py",
            "                self._release(reason, [rank])\n        return waiting",
            "                pass\n        return waiting",
            [
                "tests/clusters/test_call_supervisor.py::"
                "test_a_rank_whose_peer_has_ended_is_released"
            ],
        ),
        Mutant(
            "credit is not given back",
            "ipc/channels.py",
            "            channel.credit += _COUNT.unpack(body)[0]\n",
            "",
            [
                "tests/ipc/test_channels.py::test_large_data_arrives_unchanged_in_both_directions"
            ],
        ),
    ],
    "an escape or a width left out": [
        Mutant(
            "a status is not escaped",
            "widgets/live_text.py",
            "{html.escape(text)}",
            "{text}",
            [ESCAPED],
        ),
        Mutant(
            "a table's head is not escaped",
            "widgets/table.py",
            """<th scope="col" style="{CELL}">{html.escape(cell)}""",
            """<th scope="col" style="{CELL}">{cell}""",
            [ESCAPED],
        ),
        Mutant(
            "a table's cell is not escaped",
            "widgets/table.py",
            "{html.escape(c)}",
            "{c}",
            [ESCAPED],
        ),
        Mutant(
            "a table's note is not escaped",
            "widgets/table.py",
            "<div>{html.escape(line)}</div>",
            "<div>{line}</div>",
            [ESCAPED],
        ),
        Mutant(
            "the lines of a long text are not escaped",
            "widgets/long_text.py",
            "{html.escape(text)}</pre></details>",
            "{text}</pre></details>",
            [ESCAPED],
        ),
        Mutant(
            "the last line of a long text is not escaped",
            "widgets/long_text.py",
            "html.escape(lines[-1][:SUMMARY_LENGTH])",
            "lines[-1][:SUMMARY_LENGTH]",
            [ESCAPED],
        ),
        Mutant(
            "the file of a long text is not escaped",
            "widgets/long_text.py",
            "{html.escape(where)}",
            "{where}",
            [ESCAPED],
        ),
        Mutant(
            "a found text is not escaped",
            "widgets/long_search.py",
            "{html.escape(found[0])}",
            "{found[0]}",
            [ESCAPED],
        ),
        Mutant(
            "the end of a found line is not escaped",
            "widgets/long_search.py",
            "+ html.escape(line[last:])",
            "+ line[last:]",
            [ESCAPED],
        ),
        Mutant(
            "the error of a search is not escaped",
            "widgets/long_search.py",
            "why = html.escape(error.strerror or str(error))",
            "why = error.strerror or str(error)",
            [ESCAPED],
        ),
        Mutant(
            "a grid's note is not escaped",
            "widgets/grid.py",
            "<div>{escape(each)}</div>",
            "<div>{each}</div>",
            [ESCAPED],
        ),
        Mutant(
            "a value is not escaped",
            "widgets/looking.py",
            "<pre>{escape(shown.text)}</pre>",
            "<pre>{shown.text}</pre>",
            [ESCAPED],
        ),
        Mutant(
            "a chart's metric is not escaped",
            "widgets/picture.py",
            'font-weight="bold">{escape(metric)}</text>',
            'font-weight="bold">{metric}</text>',
            [ESCAPED],
        ),
        Mutant(
            "a mark is not escaped",
            "widgets/picture.py",
            "{escape(str(mark))}",
            "{mark}",
            [ESCAPED],
        ),
        Mutant(
            "widgets' texts are not escaped",
            "widgets/widget_board.py",
            "{html.escape(text)}",
            "{text}",
            [ESCAPED],
        ),
        Mutant(
            "a history is not escaped",
            "clusters/collective_history.py",
            "{html.escape(self.summary)}",
            "{self.summary}",
            [ESCAPED],
        ),
        Mutant(
            "a line is two characters wider than the terminal",
            "widgets/live_text.py",
            "[: width - 1]",
            "[: width + 2]",
            [
                "tests/widgets/test_live_text.py::"
                "test_a_line_leaves_the_last_column_of_the_terminal_free"
            ],
        ),
        Mutant(
            "a table's columns are one character too narrow",
            "widgets/table.py",
            "max(len(cell) for cell in column)",
            "max(len(cell) for cell in column) - 1",
            [
                "tests/widgets/test_table.py::"
                "test_the_text_is_aligned_and_ends_with_the_caption"
            ],
        ),
    ],
    "an error swallowed": [
        Mutant(
            "a short message is accepted",
            "collectives/mailbox.py",
            "if got != self._size:",
            "if got > self._size:",
            [SHORT],
        ),
        Mutant(
            "the error of a message is not raised",
            "collectives/mailbox.py",
            "        if self.error is not None:\n            raise self.error\n",
            "",
            [SHORT],
        ),
        Mutant(
            "a wait does not raise the error of its call",
            "collectives/handle.py",
            "            self._is_seen = True\n            raise self._error\n",
            "            self._is_seen = True\n",
            [f"{HANDLE}::test_a_wait_raises_the_error_of_the_call"],
        ),
        Mutant(
            "a log without a value is accepted",
            "telemetry/recorder.py",
            "        if not scalars:\n            raise UsageError(",
            "        if not scalars:\n            UsageError(",
            [
                f"{RECORDER}::"
                "test_a_call_without_a_value_or_with_an_invalid_step_is_refused"
            ],
        ),
        Mutant(
            "a write that fails raises nothing",
            "ipc/atomic_files.py",
            "        beside.unlink(missing_ok=True)\n        raise\n",
            "        beside.unlink(missing_ok=True)\n        return\n",
            ["tests/ipc/test_atomic_files.py::test_a_failed_write_leaves_the_old_file"],
        ),
        Mutant(
            "a segment of another user is opened",
            "collectives/sync/shared_segment.py",
            "if found.st_uid != os.geteuid() or found.st_size != size:",
            "if False:",
            [SEGMENT_LEAK],
        ),
        Mutant(
            "a message with other buffers is admitted",
            "ipc/signed_messages.py",
            'compare_digest(seal["buffers"], _digest(buffers))',
            "True",
            [f"{SIGNED}::test_changed_buffers_are_refused"],
        ),
        Mutant(
            "a message is admitted again",
            "ipc/signed_messages.py",
            "if -ahead >= WINDOW or self._taken >> -ahead & 1:",
            "if -ahead >= WINDOW:",
            [
                f"{SIGNED}::"
                "test_an_authentic_message_is_admitted_once_as_bytes_or_frames"
            ],
        ),
        Mutant(
            "a NaN differs a little",
            "training/replicas.py",
            'return float("inf") if number != number else number',
            "return 0.0 if number != number else number",
            [FURTHEST],
        ),
        Mutant(
            "ranks in the wrong order are left out",
            "wire.py",
            " and int(first) <= int(last)):",
            "):",
            [f"{RANKS}::test_another_text_is_refused"],
        ),
        Mutant(
            "a start without enough memory is not refused",
            "clusters/placement.py",
            "if left is not None and needed > left:",
            "if False:",
            [
                f"{PLACEMENT}::"
                "test_a_request_that_cannot_be_met_is_refused_with_the_next_step"
            ],
        ),
        Mutant(
            "a damaged state is loaded",
            "training/elastic/checkpoint.py",
            "if digest.digest() != expected:",
            "if False:",
            [
                "tests/training/test_elastic_state.py::test_every_changed_byte_is_noticed"
            ],
        ),
        Mutant(
            "a message that is too large for a packet is sent",
            "ipc/direct_socket.py",
            "if len(sizes) + sum(map(len, views)) > MOST_BYTES:",
            "if False:",
            ["tests/ipc/test_direct_socket.py"],
        ),
        Mutant(
            "a block with a NaN is decoded to numbers",
            "collectives/compression.py",
            "torch.amax(part.abs(), dim=1, out=scale)",
            "torch.amax(part.abs().nan_to_num(), dim=1, out=scale)",
            [
                "tests/collectives/test_compression.py::test_a_block_with_a_value_that_is_not_finite_is_nan"
            ],
        ),
    ],
    "a message without its rank": [
        Mutant(
            "a death does not name its rank",
            "clusters/rank_registry.py",
            'who = f"rank {rank} (pid {info.pid} on {info.host})"',
            'who = f"pid {info.pid} on {info.host}"',
            [f"{REGISTRY}::test_a_selection_of_dead_ranks_says_which_ranks_live"],
        ),
        Mutant(
            "a stall does not name its ranks",
            "clusters/stall_detector.py",
            'f"rank {rank} for {now - each.since:.0f} s:',
            'f"for {now - each.since:.0f} s:',
            [STALL],
        ),
        Mutant(
            "a stall does not name the awaited rank",
            "clusters/stall_detector.py",
            'f"the others wait for rank {format_ranks(awaited)}"',
            '"the others wait"',
            [STALL],
        ),
        Mutant(
            "a failure does not name its ranks",
            "clusters/failures.py",
            """f"rank{'s' if len(alike) > 1 else ''} {ranks} of""",
            """f"{len(alike)} of""",
            [
                "tests/clusters/test_failures.py::"
                "test_equal_failures_are_shown_once_with_their_ranks_and_hosts"
            ],
        ),
        Mutant(
            "the report of a full GPU does not name its ranks",
            "clusters/oom_report.py",
            'f"  rank {info.rank}: {_holding(answer, info)}"',
            'f"  {_holding(answer, info)}"',
            ["tests/clusters/test_oom_report.py::test_every_rank_on_the_gpu_is_named"],
        ),
        Mutant(
            "a slow rank is not named",
            "widgets/slow_rank.py",
            'f"rank {slow} takes',
            'f"a rank takes',
            ["tests/widgets/test_slow_rank.py"],
        ),
        Mutant(
            "the error of a message does not name the sender",
            "collectives/mailbox.py",
            "label = f\"recv from rank {'any' if source is None else source}, tag",
            'label = f"recv, tag',
            [SHORT],
        ),
        Mutant(
            "lines do not name their rank",
            "widgets/cell_view.py",
            'return f"\\x1b[1m[{format_ranks(ranks)}]\\x1b[0m"',
            'return ""',
            ["tests/widgets/test_cell_view.py::test_lines_are_shown_under_their_ranks"],
        ),
        Mutant(
            "a time-out does not name the missing ranks",
            "collectives/call.py",
            "Missing: {_names(missing)}.",
            "Some are missing.",
            [
                "tests/collectives/test_signature.py::test_the_timeout_names_the_missing_ranks"
            ],
        ),
        Mutant(
            "a difference does not name its ranks",
            "wire.py",
            "differs on rank {' and '.join(others)} from rank {most}",
            "differs",
            ["tests/training/test_differences.py::test_a_difference_names_its_ranks"],
        ),
    ],
    "an off-by-one": [
        Mutant(
            "a worker returns half a line",
            "clusters/workers.py",
            '            data = data[: data.rfind(b"\\n") + 1]\n',
            "            pass\n",
            [WORKER],
        ),
        Mutant(
            "a worker's line comes without its end",
            "clusters/workers.py",
            'data[: data.rfind(b"\\n") + 1]',
            'data[: data.rfind(b"\\n")]',
            [WORKER],
        ),
        Mutant(
            "one GPU too few is used",
            "clusters/placement.py",
            "in_use_first[: -(-ranks // per_gpu)]",
            "in_use_first[: ranks // per_gpu]",
            [f"{PLACEMENT}::test_every_placement_is_complete_and_fits"],
        ),
        Mutant(
            "one rank too few may share a core",
            "clusters/placement.py",
            "if n > most:",
            "if n >= most:",
            [f"{PLACEMENT}::test_as_many_ranks_as_a_host_can_carry_are_started"],
        ),
        Mutant(
            "a chunk of a ring is one element too short",
            "collectives/transports/ring.py",
            "[i * size + min(i, extra) for i",
            "[i * size + min(i, extra - 1) for i",
            [
                "tests/collectives/test_ring.py::"
                "test_chunks_cover_everything_once_and_evenly"
            ],
        ),
        Mutant(
            "ranks with a gap are written as one range",
            "wire.py",
            "parts[-1][-1] == rank - 1:",
            "parts[-1][-1] >= rank - 2:",
            [f"{RANKS}::test_a_list_is_read_as_it_was_written"],
        ),
        Mutant(
            "the last rank of a range is left out",
            "wire.py",
            "ranks.update(range(int(first), int(last) + 1))",
            "ranks.update(range(int(first), int(last)))",
            [f"{RANKS}::test_a_list_is_read_as_it_was_written"],
        ),
        Mutant(
            "one line too many is common to all ranks",
            "widgets/lines.py",
            "common = common[: equal.index(False)]",
            "common = common[: equal.index(False) + 1]",
            [LINES],
        ),
        Mutant(
            "a step that is repeated keeps its old value",
            "telemetry/series.py",
            "self._forget_from(step // width)",
            "self._forget_from(step // width + 1)",
            [
                "tests/telemetry/test_series.py::"
                "test_a_step_that_goes_back_removes_what_followed"
            ],
        ),
        Mutant(
            "the oldest call of a full record seems to be missing",
            "ipc/flight_record.py",
            "        last > CALLS,\n",
            "        last >= CALLS,\n",
            [f"{FLIGHT}::test_the_last_thousand_calls_are_kept"],
        ),
        Mutant(
            "a crash has one frame too few",
            "clusters/crash_report.py",
            "map(str, frames[-MOST_LINES:])",
            "map(str, frames[1 - MOST_LINES :])",
            ["tests/clusters/test_crash_report.py::test_a_deep_stack_is_cut"],
        ),
        Mutant(
            "a batch that lacks a sample is no less full",
            "training/data/sampler.py",
            "b[1] - b[0] == self.batch_size",
            "b[1] - b[0] >= self.batch_size - 1",
            ["tests/training/test_batch_sampler.py"],
        ),
        Mutant(
            "the first group alone is scaled",
            "training/learning_rate.py",
            "    for group in optimizer.param_groups:\n",
            "    for group in optimizer.param_groups[:1]:\n",
            ["tests/training/test_learning_rate.py::test_every_group_is_scaled"],
        ),
        Mutant(
            "the device of a rank is its neighbour's",
            "ipc/device_assignment.py",
            "return self.visible_gpus.index(self.gpu_uuid)",
            "return self.visible_gpus.index(self.gpu_uuid) - 1",
            ["tests/ipc/test_device_assignment.py"],
        ),
    ],
    "a leak": [
        Mutant(
            "an ended process keeps its descriptor",
            "clusters/rank_registry.py",
            "        os.close(descriptor)\n\n    def close(self)",
            "\n    def close(self)",
            [f"{REGISTRY}::test_a_process_that_is_not_watched_keeps_no_descriptor"],
        ),
        Mutant(
            "a segment that cannot be made keeps its descriptor",
            "collectives/sync/shared_segment.py",
            "            return cls(descriptor, size)\n"
            "        except BaseException:\n"
            "            os.close(descriptor)\n"
            "            raise\n\n"
            "    @property",
            "            return cls(descriptor, size)\n"
            "        except BaseException:\n"
            "            raise\n\n"
            "    @property",
            [SEGMENT_LEAK],
        ),
        Mutant(
            "a segment that is refused keeps its descriptor",
            "collectives/sync/shared_segment.py",
            "            os.close(descriptor)\n            raise\n\n    def close_file",
            "            raise\n\n    def close_file",
            [SEGMENT_LEAK],
        ),
        Mutant(
            "a segment's file stays open",
            "collectives/sync/shared_segment.py",
            "            os.close(self._descriptor)\n",
            "",
            [SEGMENT_LEAK],
        ),
        Mutant(
            "a file of another user stays open",
            "ipc/private_files.py",
            "    except BaseException:\n        os.close(descriptor)\n        raise\n",
            "    except BaseException:\n        raise\n",
            [
                "tests/ipc/test_private_files.py::"
                "test_only_a_regular_private_file_of_this_user_is_opened"
            ],
        ),
        Mutant(
            "a write that fails leaves its second file",
            "ipc/atomic_files.py",
            "        beside.unlink(missing_ok=True)\n        raise\n",
            "        raise\n",
            ["tests/ipc/test_atomic_files.py::test_a_failed_write_leaves_the_old_file"],
        ),
        Mutant(
            "a recorder's thread does not end",
            "telemetry/recorder.py",
            "        self._closed = True\n        self._hurry.set()\n",
            "        self._hurry.set()\n",
            [f"{RECORDER}::test_close_publishes_the_rest_and_may_be_called_twice"],
        ),
        Mutant(
            "the descriptor for a refusal is not given back",
            "ipc/listening.py",
            "            os.close(spare)\n",
            "            pass\n",
            ["tests/ipc/test_listening.py"],
        ),
        Mutant(
            "a sampler's thread does not end",
            "telemetry/sampler.py",
            "            self._open.release()\n",
            "            pass\n",
            [
                "tests/telemetry/test_sampler.py::test_the_sampler_records_samples_until_it_is_closed"
            ],
        ),
    ],
    "a state left out": [
        Mutant(
            "a received message is not counted",
            "collectives/mailbox.py",
            "            self.traffic.receive(source, full)\n",
            "            pass\n",
            [COUNTED],
        ),
        Mutant(
            "a message from any rank is not counted",
            "collectives/mailbox.py",
            "                self.receive(message.source, tag)\n",
            "                pass\n",
            [COUNTED],
        ),
        Mutant(
            "the unfinished workers count as reported",
            "clusters/workers.py",
            "worker.reported = worker.ended",
            "worker.reported = True",
            [AWAITED],
        ),
        Mutant(
            "a rank takes another rank's device",
            "engine/calls.py",
            '"local_rank", "device")',
            '"local_rank")',
            [f"{COPIED}::test_the_names_of_every_cell_are_kept"],
        ),
        Mutant(
            "replicas on other devices differ",
            "training/leaves.py",
            'RANKS_OWN = {"rank", "local_rank", "device"}',
            'RANKS_OWN = {"rank", "local_rank"}',
            [
                "tests/training/test_digest.py::"
                "test_what_replicas_know_of_their_rank_and_its_code_is_left_out"
            ],
        ),
        Mutant(
            "lost batches are not counted",
            "telemetry/collector.py",
            "        stream.lost += batch.sequence - stream.expected\n",
            "",
            [f"{COLLECTOR}::test_lost_batches_and_dropped_records_are_counted"],
        ),
        Mutant(
            "dropped records are not counted",
            "telemetry/recorder.py",
            "                self._dropped += 1\n",
            "                pass\n",
            [f"{RECORDER}::test_logging_does_not_wait_and_drops_the_oldest_records"],
        ),
        Mutant(
            "a refused message is not counted",
            "ipc/signed_messages.py",
            "            self.refused += 1\n",
            "",
            [
                f"{SIGNED}::"
                "test_an_authentic_message_is_admitted_once_as_bytes_or_frames"
            ],
        ),
        Mutant(
            "a save keeps no previous file",
            "training/elastic/checkpoint.py",
            "        _keep_previous(path)\n",
            "",
            [
                "tests/training/test_elastic_state.py::test_an_incomplete_file_is_refused_and_the_previous_one_is_used"
            ],
        ),
        Mutant(
            "an earlier step keeps the rate",
            "telemetry/progress.py",
            "            self.points.clear()\n",
            "            pass\n",
            [
                "tests/telemetry/test_progress.py::test_a_return_to_an_earlier_step_begins_the_rate_anew"
            ],
        ),
        Mutant(
            "updates are merged across other messages",
            "ipc/comm_queue.py",
            "                self._latest.clear()\n                self._waiting",
            "                self._waiting",
            [
                "tests/ipc/test_comm_queue.py::test_updates_are_not_merged_across_other_messages"
            ],
        ),
        Mutant(
            "a notice is printed again and again",
            "widgets/live_text.py",
            "if head and head != self._notice:",
            "if head:",
            ["tests/widgets/test_live_text.py::test_a_notice_is_printed_once"],
        ),
    ],
}
