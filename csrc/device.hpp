// The GPU that a call runs on.
#pragma once

#include "flash_cute/params.hpp"

namespace flash_cute {

struct Gpu {
  DeviceInfo info;
  int compute_capability;  // 90 for 9.0
};

// Asked of the runtime once; throws where it can't tell.
Gpu const& gpu_at(int index);

}  // namespace flash_cute
