#pragma once
namespace flash_cute {
void set_regions(size_t const (&at)[9]);
void run(BackwardParams params, BackwardPlan const& plan, unsigned seed, int policy);
extern int const kBucket, kTileIndex; extern bool const kHalf;
}
