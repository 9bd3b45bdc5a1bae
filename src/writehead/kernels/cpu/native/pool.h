// One persistent pool of threads. `run` calls f(argument, part, parts) once for every part and returns when all are done; the
// caller takes part 0. Between calls the threads spin for a short while, because a step is many small calls, then sleep.
#pragma once

namespace pool {

typedef void (*Function)(void* argument, int part, int parts);

int size();
void resize(int threads);
void run(Function f, void* argument, int parts);

template <class F> void parallel(int parts, F&& f) {
  if (parts > size()) parts = size();
  if (parts <= 1) return f(0, 1);
  run([](void* g, int part, int n) { (*static_cast<F*>(g))(part, n); }, &f, parts);
}

}  // namespace pool
