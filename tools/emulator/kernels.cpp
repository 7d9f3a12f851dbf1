#include "emu_host.hpp"
#include <cstddef>
#include <cute/tensor.hpp>
#undef __launch_bounds__
#define __launch_bounds__(...)
#include "flash_cute/backward/plan.hpp"
#include "flash_cute/backward/kernel_sm80.hpp"
#include "flash_cute/backward/postprocess_sm80.hpp"
#include "flash_cute/backward/preprocess_sm80.hpp"
#include "run.hpp"
namespace flash_cute {
template <class Instance, int index>
void run_tile(BackwardParams params, BackwardPlan const& plan, unsigned seed, int policy) {
  constexpr BackwardTiles kTiles = backward_tiles(Instance::family, Instance::head_dim);
  using Traits = BackwardTraitsSm80<Instance, kTiles.keys[index]>;
  plan.split_groups(params);  // as BackwardKernel::run does?
  if (plan.tile != kTiles.keys[index]) { printf("tile is another\n"); exit(1); }
  int const queries = plan.query_blocks * params.shape.heads_q;
  emu::detect = false;
  emu::launch(queries, 256, 0, seed, 1, [&] { backward_preprocess_sm80<Instance, Traits::kBlockM, 256>(params); });
  emu::detect = true;
  KeyOrderSm80 const order{plan.order, plan.last_pairs};
  using Shared = typename Traits::SharedStorage;
  size_t at[] = {offsetof(Shared, k), offsetof(Shared, v), offsetof(Shared, q), offsetof(Shared, dout), offsetof(Shared, ds), offsetof(Shared, p), offsetof(Shared, weights), offsetof(Shared, lse), offsetof(Shared, delta)};
  set_regions(at);
  auto keys = [&]<DqSums sums>() { emu::launch(plan.tiles, Traits::kThreads, sizeof(Shared), seed + 1, policy, [&] { backward_kernel_sm80<Traits, sums>(params, order); }); };
  if constexpr (Traits::kTile.knows_dq) { if (plan.sums_dq) keys.template operator()<DqSums::all>(); else keys.template operator()<DqSums::none>(); }
  else keys.template operator()<DqSums::asked>();
  emu::detect = false;
  if (plan.key_parts() > 0) emu::launch(plan.key_parts(), Traits::kKeyThreads, 0, seed + 2, 1, [&] { backward_join<Traits>(params); });
  if (plan.sums_dq) emu::launch(queries, Traits::kThreads, 0, seed + 3, 1, [&] { backward_postprocess_sm80<Traits>(params); });
}
#ifndef TILE
#define TILE 0
#endif
#ifndef ELEM
#define ELEM bf16
#endif
int const kBucket = BUCKET; int const kTileIndex = TILE; bool const kHalf = ElementType::ELEM == ElementType::fp16;
void run(BackwardParams params, BackwardPlan const& plan, unsigned seed, int policy) {
  run_tile<Instance<Family::sm80, ElementType::ELEM, BUCKET>, TILE>(params, plan, seed, policy);
}
}
