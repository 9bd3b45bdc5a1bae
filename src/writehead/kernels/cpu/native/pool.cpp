#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() std::this_thread::yield()
#endif

namespace pool {
namespace {

constexpr auto SPIN = std::chrono::microseconds(100);

struct Pool {
  std::vector<std::thread> threads;
  std::mutex mutex;  // sleeping and waking
  std::condition_variable wake;
  std::atomic<unsigned> round{0};
  std::atomic<int> left{0};
  std::atomic<bool> quit{false};
  Function function = nullptr;
  void* argument = nullptr;
  int parts = 0;
};

Pool* current = nullptr;  // never destroyed while threads may run: a fork or an exit must not join
int wanted = 1;
std::mutex calls;  // one call at a time, from whatever thread

void worker(Pool* p, int part, unsigned seen) {
  for (;;) {
    auto started = std::chrono::steady_clock::now();
    unsigned now;
    for (int i = 0; (now = p->round.load(std::memory_order_acquire)) == seen; i++) {
      RELAX();
      if (i % 64 == 63 && std::chrono::steady_clock::now() - started > SPIN) {
        std::unique_lock<std::mutex> lock(p->mutex);
        p->wake.wait(lock, [&] { return p->round.load(std::memory_order_acquire) != seen; });
      }
    }
    seen = now;
    if (p->quit.load(std::memory_order_acquire)) return;
    if (part < p->parts) p->function(p->argument, part, p->parts);
    p->left.fetch_sub(1, std::memory_order_release);
  }
}

void begin(Pool* p) {
  {
    std::lock_guard<std::mutex> lock(p->mutex);
    p->round.fetch_add(1, std::memory_order_release);
  }
  p->wake.notify_all();
}

void start() {
  current = new Pool;
  for (int i = 1; i < wanted; i++) current->threads.emplace_back(worker, current, i, 0u);
}

void stop() {
  if (!current) return;
  current->quit.store(true, std::memory_order_release);
  begin(current);
  for (auto& t : current->threads) t.join();
  delete current;
  current = nullptr;
}

void forget_in_child() {  // the child of a fork has none of the threads
  new (&calls) std::mutex;
  current = nullptr;
}

const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);

}  // namespace

int size() { return wanted; }

void resize(int threads) {
  std::lock_guard<std::mutex> lock(calls);
  if (threads == wanted) return;
  stop();
  wanted = threads < 1 ? 1 : threads;
}

void run(Function f, void* argument, int parts) {
  (void)registered;
  std::lock_guard<std::mutex> lock(calls);
  if (!current) start();
  Pool* p = current;
  p->function = f;
  p->argument = argument;
  p->parts = parts;
  p->left.store((int)p->threads.size(), std::memory_order_relaxed);
  begin(p);
  f(argument, 0, parts);
  for (int i = 0; p->left.load(std::memory_order_acquire); i++) {
    RELAX();
    if (i > 20000) std::this_thread::yield();  // more threads than processors: let them work
  }
}

}  // namespace pool
