// SPDX-License-Identifier: Apache-2.0
#include "algorithm_table.h"

#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <type_traits>

namespace octavo::kernels {
namespace {

constexpr std::string_view kBlanks = " \t\r";

// One line, read field by field.
class Line {
 public:
  Line(std::string_view text, const std::string& name, size_t number)
      : rest_(text.substr(0, text.find('#'))), name_(name), number_(number) {
    rest_ = rest_.substr(0, rest_.find_last_not_of(kBlanks) + 1);  // npos + 1 is 0
    skip_blanks();
  }

  bool is_empty() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }

  // name="TEXT"
  std::string quoted(const std::string& field) {
    const std::string expected = field + "=\"NAME\"";
    expect(field + "=\"", expected);
    const size_t end = rest_.find('"');
    if (end == 0 || end == std::string_view::npos) fail(expected);
    const std::string value(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    skip_blanks();
    return value;
  }

  // name=NUMBER, from `least` to what T holds
  template <typename T>
  T number(const std::string& field, T least = 0, T most = std::numeric_limits<T>::max()) {
    const std::string expected = field + "=NUMBER from " + std::to_string(least) + " to " + std::to_string(most);
    expect(field + "=", expected);
    T value{};
    const std::string_view text = word();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) fail(expected, text);
    advance(text);
    return value;
  }

  bool flag(const std::string& field) { return number<uint16_t>(field, 0, 1) == 1; }

  // name=e4m3 or another of `types`
  cudaDataType_t type(const std::string& field, std::initializer_list<cudaDataType_t> types) {
    return *optional_type(field, types, false);
  }
  std::optional<cudaDataType_t> optional_type(const std::string& field, std::initializer_list<cudaDataType_t> types,
                                              bool may_be_none = true) {
    std::string expected = field + "=" + (may_be_none ? "none" : "");
    for (const cudaDataType_t type : types)
      expected += (expected.back() == '=' ? "" : "|") + std::string(name_of(type));
    expect(field + "=", expected);
    const std::string_view text = word();
    for (const cudaDataType_t type : types) {
      if (text != name_of(type)) continue;
      advance(text);
      return type;
    }
    if (!may_be_none || text != "none") fail(expected, text);
    advance(text);
    return std::nullopt;
  }

  void end() const {
    if (!is_empty()) fail("the end of the line");
  }

  [[noreturn]] void fail(const std::string& expected) const { fail(expected, rest_); }
  [[noreturn]] void fail(const std::string& expected, std::string_view found) const {
    throw std::runtime_error("octavo: " + name_ + ":" + std::to_string(number_) + ": expected " + expected +
                             (found.empty() ? ", found the end of the line" : ", found " + std::string(found)));
  }

 private:
  void expect(const std::string& beginning, const std::string& expected) {
    if (!rest_.starts_with(beginning)) fail(expected);
    rest_.remove_prefix(beginning.size());
  }
  std::string_view word() const { return rest_.substr(0, rest_.find_first_of(kBlanks)); }
  void advance(std::string_view word) {
    rest_.remove_prefix(word.size());
    skip_blanks();
  }
  void skip_blanks() { rest_.remove_prefix(std::min(rest_.find_first_not_of(kBlanks), rest_.size())); }

  std::string_view rest_;
  const std::string& name_;
  size_t number_;
};

Product parse_product(Line& line) {
  constexpr auto kLongest = std::numeric_limits<int64_t>::max();
  Product p;
  p.m = line.number<int64_t>("m", 1, kLongest);
  p.n = p.ld = line.number<int64_t>("n", 1, kLongest);
  p.k = line.number<int64_t>("k", 1, kLongest);
  p.a_type = line.type("a", {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_16BF});
  p.b_type = line.type("b", {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_16BF});
  p.d_type = line.type("d", {CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F});
  p.bias_type = line.optional_type("bias", {CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F});
  p.fast_accumulation = line.flag("fast");
  p.accumulate = line.flag("accumulate");
  p.scaled = p.a_type != CUDA_R_16BF;
  p.alignment = kTunedAlignment;
  return p;
}

Algorithm parse_algorithm(Line& line) {
  Algorithm a;
  a.id = line.number<int32_t>("id");
  a.tile = line.number<uint32_t>("tile");
  a.stages = line.number<uint32_t>("stages");
  a.split_k = line.number<int32_t>("splitk", std::numeric_limits<int32_t>::min());
  const Line before = line;
  a.reduction = line.number<uint32_t>("reduction");
  if (!sums_in_float32(a)) before.fail("reduction=0 (none) or reduction=2 (in float32)");
  a.swizzle = line.number<uint32_t>("swizzle");
  a.custom = line.number<uint32_t>("custom");
  a.inner_shape = line.number<uint16_t>("inner");
  a.cluster_shape = line.number<uint16_t>("cluster");
  return a;
}

}  // namespace

std::vector<TableEntry> parse_table(std::string_view text, const std::string& name) {
  std::vector<TableEntry> entries;
  bool has_header = false;
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1);
    Line line(text.substr(0, end + 1 - (text[end] == '\n')), name, ++number);
    text.remove_prefix(end + 1);
    if (line.is_empty()) continue;
    if (!has_header) {
      if (line.rest() != kTableHeader) line.fail(std::string(kTableHeader));
      has_header = true;
      continue;
    }
    TableEntry entry;
    entry.device = line.quoted("device");
    entry.cublaslt = line.number<size_t>("cublaslt");
    entry.product = parse_product(line);
    entry.algorithm = parse_algorithm(line);
    line.end();
    entries.push_back(entry);
  }
  if (!has_header) Line("", name, number + 1).fail(std::string(kTableHeader));
  return entries;
}

std::string to_line(const TableEntry& entry) {
  const Product& p = entry.product;
  const Algorithm& a = entry.algorithm;
  std::string line = "device=\"" + entry.device + '"';
  const auto field = [&](const char* name, const auto& value) {
    line += std::string(" ") + name + '=';
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(value)>>) {
      line += std::to_string(value);
    } else {
      line += value;
    }
  };
  field("cublaslt", entry.cublaslt);
  field("m", p.m), field("n", p.n), field("k", p.k);
  field("a", name_of(p.a_type)), field("b", name_of(p.b_type)), field("d", name_of(p.d_type));
  field("bias", p.bias_type ? name_of(*p.bias_type) : "none");
  field("fast", int{p.fast_accumulation}), field("accumulate", int{p.accumulate});
  field("id", a.id), field("tile", a.tile), field("stages", a.stages), field("splitk", a.split_k);
  field("reduction", a.reduction), field("swizzle", a.swizzle), field("custom", a.custom);
  field("inner", a.inner_shape), field("cluster", a.cluster_shape);
  return line;
}

}  // namespace octavo::kernels
