// SPDX-License-Identifier: Apache-2.0
// Which operations touch the same bytes with no order between them.
//
// The order is what CUDA promises, and not what happened: an operation's ``deps``, and what the host knew
// when it gave it. So one run shows a missing wait, whichever order it took.
#include <algorithm>
#include <tuple>

#include "world.h"

namespace fake_gpu {

static const size_t MOST_RAN = 20000, SEEN_THEN = 5000;

// Reads come first, then writes; each by address, and merged where they touch.
void sort_spans(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& one, const Span& two) {
    return std::tie(one.writes, one.from) < std::tie(two.writes, two.from);
  });
  std::vector<Span> merged;
  for (const Span& span : spans) {
    if (!merged.empty() && merged.back().writes == span.writes && span.from <= merged.back().to)
      merged.back().to = std::max(merged.back().to, span.to);
    else if (span.to > span.from)
      merged.push_back(span);
  }
  spans.swap(merged);
}

// Calls ``found`` with what spans of ``ones`` have in common with those of ``others``, one of both writing, and
// as ``ones`` touch it, until it returns false.
template <class Found>
static void each_meeting(const std::vector<Span>& ones, const std::vector<Span>& others, const Found& found) {
  for (const Span& one : ones) {
    for (int written = one.writes ? 0 : 1; written < 2; written++) {
      auto other = std::partition_point(others.begin(), others.end(), [&](const Span& each) {
        return each.writes < bool(written) || (each.writes == bool(written) && each.to <= one.from);
      });
      for (; other != others.end() && other->writes == bool(written) && other->from < one.to; other++)
        if (!found(Span{std::max(one.from, other->from), std::min(one.to, other->to), one.writes})) return;
    }
  }
}

bool meets(const std::vector<Span>& ones, const std::vector<Span>& others) {
  bool any = false;
  each_meeting(ones, others, [&](const Span&) { return !(any = true); });
  return any;
}

static void mark_all_before(World& w, const OpPtr& op) {
  uint64_t mark = ++w.marks;
  op->mark = mark;
  std::vector<Op*> open{op.get()};
  while (!open.empty()) {
    Op* one = open.back();
    open.pop_back();
    for (auto& dep : one->deps)
      if (dep->mark != mark) {
        dep->mark = mark;
        open.push_back(dep.get());
      }
  }
}

// An operation has run: it is compared with all that ran before it and that nothing orders before it.
void check_races(World& w, const OpPtr& op) {
  if (w.race_check && !op->spans.empty()) {
    mark_all_before(w, op);
    for (auto& other : w.ran) {
      if (other->mark == op->mark || other->stream == op->stream) continue;
      if (other->seen && other->seen < op->id) continue;  // the host gave this one knowing that one's end
      if (!meets(op->spans, other->spans)) continue;
      w.races++;
      if (say_once(w, op->name + " / " + other->name) || w.race_each)
        each_meeting(op->spans, other->spans, [&](const Span& span) {
          say("RACE: #%lu %s (stream %d) %s %zu bytes at %#zx, and nothing orders it with #%lu %s (stream %d)",
              (unsigned long)op->id, op->name.c_str(), op->stream->number, span.writes ? "writes" : "reads",
              size_t(span.to - span.from), size_t(span.from), (unsigned long)other->id, other->name.c_str(),
              other->stream->number);
          return w.race_each;
        });
      if (w.race_abort) abort();
    }
  }
  w.ran.push_back(op);
  if (w.ran.size() > MOST_RAN) see(w, w.ran[SEEN_THEN]);  // a program that never waits must not fill the memory
}

template <class Look>
static void each_queue(World& w, const Look& look) {
  for (auto& device : w.devices) look(device.legacy.queue);
  for (auto* stream : w.streams) look(stream->queue);
}

// The host touches memory. Of kernels that have not begun it is not known what they touch.
const Op* at_work_on(World& w, std::vector<Span> spans) {
  sort_spans(spans);
  const Op* found = nullptr;
  for (auto& other : w.ran)
    if (!found && !other->seen && meets(spans, other->spans)) found = other.get();
  each_queue(w, [&](std::deque<OpPtr>& queue) {
    for (auto& other : queue) {
      if (found) return;
      auto theirs = other->spans;
      sort_spans(theirs);
      if (meets(spans, theirs)) found = other.get();
    }
  });
  return found;
}

// Forgets what none that is still to run can meet without an order.
static void retire(World& w) {
  uint64_t first = w.ops + 1;
  each_queue(w, [&](std::deque<OpPtr>& queue) {
    if (!queue.empty()) first = std::min(first, queue.front()->id);
  });
  auto gone = [first](const OpPtr& each) { return each->seen && each->seen < first; };
  for (auto& each : w.ran)
    if (gone(each)) each->deps.clear();
  w.ran.erase(std::remove_if(w.ran.begin(), w.ran.end(), gone), w.ran.end());
}

// Whoever knows an operation's end knows that of all before it.
void see(World& w, const OpPtr& op) {
  std::vector<OpPtr> open{op};
  while (!open.empty()) {
    OpPtr one = std::move(open.back());
    open.pop_back();
    if (one->seen) continue;
    one->seen = w.ops;
    for (auto& dep : one->deps) open.push_back(dep);
  }
  if (w.ran.size() > w.keep) {
    retire(w);
    w.keep = 2 * w.ran.size() + 100;
  }
}

void forget(World& w, Address from, Address to) {
  for (auto& op : w.ran) {
    if (std::none_of(op->spans.begin(), op->spans.end(),
                     [&](const Span& span) { return span.from < to && from < span.to; }))
      continue;
    std::vector<Span> left;
    for (const Span& span : op->spans) {
      if (span.from >= to || from >= span.to) left.push_back(span);
      if (span.from < from && from < span.to) left.push_back({span.from, from, span.writes});
      if (span.from < to && to < span.to) left.push_back({to, span.to, span.writes});
    }
    sort_spans(left);
    op->spans.swap(left);
  }
}

}  // namespace fake_gpu
