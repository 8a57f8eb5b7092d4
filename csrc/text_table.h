// SPDX-License-Identifier: Apache-2.0
// What the tables that decide bits have in common: texts that the library brings, and a hash to tell two apart.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>

namespace octavo {

// Made by CMake of the files of a folder.
struct ShippedTable {
  const char* name;
  const char* text;
};

// FNV-1a, in hexadecimal.
inline std::string text_hash(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

// The text of a file; false where it is none that can be read.
inline bool read_text(const std::string& path, std::string& text) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;
  std::ifstream file(path, std::ios::binary);
  text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return file.is_open() && !file.bad();
}

}  // namespace octavo
