// The emulator's runtime: launches and their blocks, one at a time, on the system's thread that asks for it.
#include "simt/simt.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "simt/state.h"

namespace dskernels::simt {

Settings settings;
std::unique_ptr<Launch> now;

namespace {

constexpr int kMaxThreads = 1024;

std::mutex one_at_a_time;

// What every fiber runs: a thread of a block, then one of the next.
void run_threads() {
  Fiber::arrived(now->launcher);
  for (;;) {
    acquire(&now->begin_order);
    (*now->body)();
    Thread& thread = self();
    if (thread.made < thread.copies.size()) fail("cp.async: copies that were never waited for", "end of kernel", 0);
    release(&now->end_order);
    thread.state = Thread::kDone;
    thread.fiber.switch_to(now->launcher);
  }
}

// Puts 0 .. count - 1 in the order of the moment.
void arrange(std::vector<int>& order, int count) {
  const bool is_new = static_cast<int>(order.size()) != count;
  order.resize(count);
  if (is_new) std::iota(order.begin(), order.end(), 0);
  if (is_new && settings.order == Order::kReverse) std::reverse(order.begin(), order.end());
  if (settings.order == Order::kRandom) std::shuffle(order.begin(), order.end(), settings.random);
}

std::string place(const char* file, int line) {
  return std::string(" (") + file + (line > 0 ? ":" + std::to_string(line) : "") + ")";
}

std::string name_of(int thread) { return "thread " + std::to_string(thread); }

std::string stuck() {
  std::string message = "nobody can go on:";
  int named = 0, done = 0;
  for (int i = 0; i < now->count; ++i) {
    const Thread& thread = *now->threads[i];
    if (thread.state == Thread::kDone) ++done;
    if (thread.state != Thread::kWaiting || ++named > 4) continue;
    message += " " + name_of(i) + " waits at " + thread.what + place(thread.file, thread.line) + ";";
  }
  return message + " " + std::to_string(done) + " threads have ended";
}

void begin_block() {
  const Unseen unseen;
  now->block.reset();
  now->block = std::make_unique<Block>();
  now->block->warps.resize((now->count + kLanes - 1) / kLanes);
  std::swap(now->threads, now->resting);
  for (int i = 0; i < now->count; ++i) {
    Thread& thread = *now->threads[i];
    thread.state = Thread::kReady;
    thread.copies.clear();
    thread.groups.clear();
    thread.made = 0;
  }
}

// Runs a block to its end, or to an error.
void run_block() {
  begin_block();
  std::vector<int> order;
  for (int left = now->count; left > 0;) {
    bool moved = false;
    arrange(order, now->count);
    for (const int i : order) {
      Thread& thread = *now->threads[i];
      if (thread.state != Thread::kReady) continue;
      moved = true;
      now->current = i;
      threadIdx = {static_cast<unsigned>(i), 0, 0};
      now->launcher.switch_to(thread.fiber);
      if (!now->error.empty()) return;
      if (thread.state == Thread::kDone) --left;
    }
    if (!moved) {
      now->error = stuck();
      return;
    }
  }
}

void check_launch(dim3 grid, int threads, int shared_bytes) {
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) throw std::runtime_error("simt: a grid too large");
  // Of these a GPU would run more than anybody waits for here.
  if (uint64_t{grid.x} * grid.y * grid.z > 0x7fffffffu) throw std::runtime_error("simt: too many blocks to emulate");
  if (threads < 1 || threads > kMaxThreads) throw std::runtime_error("simt: expected 1 to 1024 threads a block");
  if (shared_bytes < 0 || static_cast<size_t>(shared_bytes) > kMaxSharedBytes) {
    throw std::runtime_error("simt: expected up to 99 KiB of shared memory, got " + std::to_string(shared_bytes));
  }
}

// Fibers are kept from launch to launch: to make one costs more than to run a short thread.
void prepare(int threads) {
  const Unseen unseen;
  if (now == nullptr) now = std::make_unique<Launch>();
  now->launcher.adopt();
  for (auto* crew : {&now->threads, &now->resting}) {
    while (static_cast<int>(crew->size()) < threads) {
      crew->push_back(std::make_unique<Thread>());
      crew->back()->fiber.begin(run_threads);
    }
  }
  now->count = threads;
}

}  // namespace

void launch(const std::function<void()>& thread, dim3 grid, int threads, int shared_bytes, bool asked) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  check_launch(grid, threads, shared_bytes);
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  prepare(threads);
  now->body = &thread;
  now->dynamic_bytes = shared_bytes;
  now->most_bytes = asked ? kMaxSharedBytes : kUnaskedSharedBytes;
  gridDim = grid;
  blockDim = dim3(threads, 1, 1);
  std::vector<int> blocks;
  arrange(blocks, static_cast<int>(grid.x * grid.y * grid.z));
  release(&now->begin_order);
  for (const int block : blocks) {
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    run_block();
    if (!now->error.empty()) break;
  }
  acquire(&now->end_order);
  if (now->error.empty()) return;
  const uint64_t block = blockIdx.x + grid.x * (blockIdx.y + uint64_t{grid.y} * blockIdx.z);
  const std::string error = "simt: block " + std::to_string(block) + ": " + now->error;
  const Unseen unseen;
  // The stacks of threads that are under way go with it.
  now.reset();
  throw std::runtime_error(error);
}

int multiprocessors() { return settings.multiprocessors; }

void fail(const char* message, const char* file, int line) {
  {
    const Unseen unseen;
    now->error = name_of(now->current) + ": " + message + place(file, line);
  }
  release(&now->end_order);
  self().fiber.switch_to(now->launcher);
  std::abort();
}

}  // namespace dskernels::simt

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

// For the tests: how the next launches go.
SIMT_EXPORT void simt_set(int order, int copies, int seed, int multiprocessors) {
  using namespace dskernels::simt;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  settings.order = static_cast<Order>(order);
  settings.copies = static_cast<Copies>(copies);
  settings.random.seed(static_cast<unsigned>(seed));
  settings.multiprocessors = multiprocessors;
}
