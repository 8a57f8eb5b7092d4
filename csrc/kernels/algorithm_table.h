// SPDX-License-Identifier: Apache-2.0
// Tables of algorithms as text: which one runs a product, on a device, with a version of cuBLASLt. Needs no GPU.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "algorithm.h"
#include "lt.h"

namespace octavo::kernels {

// First line of every table; the number is the format's.
constexpr std::string_view kTableHeader = "octavo-gemm-table 1";

struct TableEntry {
  std::string device;   // cudaDeviceProp::name
  size_t cublaslt = 0;  // cublasLtGetVersion()
  Product product;      // with ld = n and kTunedAlignment
  Algorithm algorithm;

  bool operator==(const TableEntry&) const = default;
};

// An entry is one line, its fields in this order; `#` begins a comment, which may follow an entry too:
//   device="NVIDIA H200" cublaslt=130100 m=16 n=4096 k=4096 a=e4m3 b=e4m3 d=bf16 bias=none fast=1 accumulate=0
//   id=66 tile=393 stages=36 splitk=1 reduction=0 swizzle=0 custom=0 inner=0 cluster=3          (all in one line)
// Where two entries are of one product, the later counts. Throws std::runtime_error, naming `name`, the line and what
// was expected there.
std::vector<TableEntry> parse_table(std::string_view text, const std::string& name);

std::string to_line(const TableEntry& entry);

}  // namespace octavo::kernels
