// SPDX-License-Identifier: Apache-2.0
#pragma once

// The library is built with hidden visibility; what a program may call is marked.
#define OCTAVO_API __attribute__((visibility("default")))
