// What the emulator knows of the launch that is running: its threads, and what its block has.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "simt/fiber.h"

namespace dskernels::simt {

constexpr int kLanes = 32;
// Of the GPUs with the least, sm_86; static and dynamic together.
constexpr size_t kMaxSharedBytes = 99 * 1024;
// For static variables, and for both together where a launch does not ask for more.
constexpr size_t kUnaskedSharedBytes = 48 * 1024;

struct Thread {
  Fiber fiber;
  enum { kReady, kWaiting, kDone } state = kDone;
  // Where it waits, for messages.
  const char* what = nullptr;
  const char* file = nullptr;
  int line = 0;
  // Copies in the order of their issue; group[i] is the number of copies up to the end of commit i.
  std::vector<Copy> copies;
  std::vector<size_t> groups;
  size_t made = 0;
};

// Lanes that wait for each other; one for each mask that is under way in a warp.
struct Meeting {
  unsigned mask = 0, here = 0;
  const char* operation = nullptr;
  void* lanes[kLanes] = {};
};

// The __syncwarps of one mask; they take turns with what orders them, as whoever goes on first may come to the next.
struct WarpSync {
  int count = 0;
  char order[2] = {};
};

struct Warp {
  std::vector<Meeting> meetings;
  std::map<unsigned, WarpSync> syncs;
};

struct Part {
  const void* key;
  size_t bytes;
  std::unique_ptr<void, void (*)(void*)> memory;
};

// What a block has of its own. It is made anew for each, as are the addresses by which ThreadSanitizer knows its
// barriers: nothing is to order the threads of two blocks.
struct Block {
  std::vector<Warp> warps;
  // The barrier.
  int waiting = 0, sum = 0, last_sum = 0, barriers = 0;
  const char* file = nullptr;
  int line = 0;
  char order[2] = {};
  std::vector<Part> shared;
  size_t static_bytes = 0, dynamic_taken = 0;
};

// All of a launch. What it was when a launch failed is of no use to the next.
struct Launch {
  const std::function<void()>* body = nullptr;
  int count = 0, current = -1;
  size_t dynamic_bytes = 0, most_bytes = 0;
  Fiber launcher;
  // Those of the block, and those of the one before and the next. To ThreadSanitizer a fiber is one thread, whose
  // accesses in two blocks never race, and whose barriers hand on what it did in the first: so two crews take turns.
  std::vector<std::unique_ptr<Thread>> threads, resting;
  std::unique_ptr<Block> block;
  // What comes before all threads, what comes after them, and the fences of all.
  char begin_order = 0, end_order = 0, fence_order = 0;
  std::string error;
};

struct Settings {
  Order order = Order::kForward;
  Copies copies = Copies::kLate;
  int multiprocessors = 4;
  std::mt19937 random{1};
};

extern Settings settings;
extern std::unique_ptr<Launch> now;

inline Thread& self() { return *now->threads[now->current]; }

}  // namespace dskernels::simt
