// What threads of a block do together: shared memory, barriers, the meetings of a warp; and their pending copies.
#include <algorithm>
#include <cstdlib>

#include "simt/state.h"

namespace dskernels::simt {
namespace {

// Dynamic memory begins behind the static variables, at a multiple of what SharedCarver aligns it to.
constexpr size_t kDynamicAlignment = 128;

void wait(const char* file, int line, const char* what) {
  Thread& thread = self();
  thread.state = Thread::kWaiting;
  thread.what = what;
  thread.file = file;
  thread.line = line;
  // For the end of a launch that fails while it waits.
  release(&now->end_order);
  thread.fiber.switch_to(now->launcher);
}

void* new_part(const void* key, size_t bytes) {
  const Unseen unseen;
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  memset(memory, 0xff, bytes);
  now->block->shared.push_back({key, bytes, {memory, std::free}});
  return memory;
}

unsigned lanes_there_are(int warp) {
  const int lanes = std::min(now->count - warp * kLanes, kLanes);
  return lanes == kLanes ? ~0u : (1u << lanes) - 1;
}

}  // namespace

void* static_shared_bytes(const void* key, size_t bytes) {
  Block& block = *now->block;
  for (const Part& part : block.shared) {
    if (part.key == key) return part.memory.get();
  }
  block.static_bytes += bytes;
  const size_t both =
      (block.static_bytes + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment + now->dynamic_bytes;
  if (block.static_bytes > kUnaskedSharedBytes || both > kMaxSharedBytes) {
    fail("more shared memory than there is", "static", 0);
  }
  if (both > now->most_bytes) fail("more shared memory than the launch has asked for", "static", 0);
  return new_part(key, bytes);
}

void* dynamic_shared(int part, size_t bytes, size_t rounded) {
  // Numbers are keys of their own: no variable lies there.
  const void* key = reinterpret_cast<const void*>(static_cast<uintptr_t>(part) + 1);
  Block& block = *now->block;
  for (const Part& known : block.shared) {
    if (known.key != key) continue;
    if (known.bytes != bytes) fail("threads take different parts of shared memory", "dynamic", 0);
    return known.memory.get();
  }
  block.dynamic_taken += rounded;
  if (block.dynamic_taken > now->dynamic_bytes) {
    fail("more dynamic shared memory than the launch asked for", "dynamic", 0);
  }
  return new_part(key, bytes);
}

int barrier_count(int value, const char* file, int line) {
  Block& block = *now->block;
  if (block.waiting > 0 && (block.line != line || strcmp(block.file, file) != 0)) {
    fail("a barrier while others wait at another one", file, line);
  }
  block.file = file;
  block.line = line;
  char& order = block.order[block.barriers % 2];
  release(&order);
  block.sum += value;
  if (++block.waiting < now->count) {
    wait(file, line, "a barrier");
  } else {
    block.last_sum = block.sum;
    block.sum = block.waiting = 0;
    ++block.barriers;
    for (int i = 0; i < now->count; ++i) now->threads[i]->state = Thread::kReady;
  }
  acquire(&order);
  return block.last_sum;
}

void barrier(const char* file, int line) { barrier_count(0, file, line); }

void meet_all(void* mine, Compute compute, const char* operation) {
  if (lanes_there_are(now->current / kLanes) != ~0u) fail("a warp that is not whole", operation, 0);
  meet(~0u, mine, compute, operation);
}

void meet(unsigned mask, void* mine, Compute compute, const char* operation) {
  const int warp = now->current / kLanes;
  const unsigned own = 1u << (now->current % kLanes);
  if ((mask & own) == 0) fail("a lane that its own mask does not name", operation, 0);
  mask &= lanes_there_are(warp);
  std::vector<Meeting>& meetings = now->block->warps[warp].meetings;
  size_t at = 0;
  while (at < meetings.size() && meetings[at].mask != mask) ++at;
  if (at == meetings.size()) {
    const Unseen unseen;
    meetings.push_back({mask, 0, operation, {}});
  }
  Meeting& meeting = meetings[at];
  if (strcmp(meeting.operation, operation) != 0) fail("lanes of a warp at different operations", operation, 0);
  meeting.here |= own;
  meeting.lanes[now->current % kLanes] = mine;
  if (meeting.here != mask) return wait(operation, 0, "a warp's operation");
  const Meeting complete = meeting;
  meetings.erase(meetings.begin() + static_cast<std::ptrdiff_t>(at));
  compute(complete.lanes, mask);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) != 0) now->threads[warp * kLanes + lane]->state = Thread::kReady;
  }
}

void sync_warp(unsigned mask) {
  const auto sync_of = [&]() -> WarpSync& {
    const Unseen unseen;
    return now->block->warps[now->current / kLanes].syncs[mask];
  };
  WarpSync& sync = sync_of();
  char& order = sync.order[sync.count % 2];
  release(&order);
  meet(
      mask, &sync,
      [](void* const* lanes, unsigned here) { ++static_cast<WarpSync*>(lanes[__builtin_ctz(here)])->count; },
      "__syncwarp");
  acquire(&order);
}

void fence() {
  release(&now->fence_order);
  acquire(&now->fence_order);
}

int lane() { return now->current % kLanes; }

bool copies_now() {
  if (settings.copies == Copies::kMixed) return settings.random() % 2 == 0;
  return settings.copies == Copies::kEarly;
}

void remember(const Copy& copy) {
  const Unseen unseen;
  self().copies.push_back(copy);
}

void cp_async_commit() {
  const Unseen unseen;
  self().groups.push_back(self().copies.size());
}

bool next_copy(int pending, Copy& copy) {
  Thread& thread = self();
  const size_t groups = thread.groups.size(), open = static_cast<size_t>(pending);
  const size_t end = groups > open ? thread.groups[groups - open - 1] : 0;
  if (thread.made >= end) return false;
  copy = thread.copies[thread.made++];
  return true;
}

}  // namespace dskernels::simt
