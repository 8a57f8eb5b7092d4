# Finds PyTorch's C++ libraries without PyTorch's own CMake package, which stops where no CUDA toolkit is.
#   OCTAVO_TORCH_DIR          torch's folder: given, else from CMAKE_PREFIX_PATH, else that of the Python in use
#   Libtorch_VERSION          2.11.0; Libtorch_RELEASE 2.11
#   Libtorch_CUDA             whether it has a CUDA half, of Libtorch_CUDA_VERSION 13.0, Libtorch_CUDA_MAJOR 13
#   octavo::libtorch          to link; and octavo::libtorch_cuda for that half
find_path(OCTAVO_TORCH_DIR include/torch/library.h
          HINTS ${CMAKE_PREFIX_PATH} ${CMAKE_CURRENT_LIST_DIR}/../../../..  # ours, in a wheel installed beside torch
          PATH_SUFFIXES torch ../..                                         # ../..: torch.utils.cmake_prefix_path
          NO_DEFAULT_PATH
          DOC "The folder of PyTorch, with include/ and lib/")
if(NOT OCTAVO_TORCH_DIR)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
              "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0], end='')"
      OUTPUT_VARIABLE torch_dir ERROR_QUIET)
    find_path(OCTAVO_TORCH_DIR include/torch/library.h HINTS ${torch_dir} NO_DEFAULT_PATH)
  endif()
endif()

if(OCTAVO_TORCH_DIR)
  file(REAL_PATH ${OCTAVO_TORCH_DIR} torch_dir)
  # version.py of a wheel (__version__ = '2.11.0+cu130'), build-version of an archive without Python (2.11.0+cu130).
  file(GLOB text ${torch_dir}/version.py ${torch_dir}/build-version)
  list(GET text 0 text)
  file(READ ${text} text)
  string(REGEX MATCH "([0-9]+\\.[0-9]+)\\.[0-9]+" Libtorch_VERSION "${text}")
  set(Libtorch_RELEASE ${CMAKE_MATCH_1})
  set(Libtorch_CUDA OFF)
  if(text MATCHES "\ncuda: [^\n]*'([0-9]+)\\.([0-9]+)" OR text MATCHES "\\+cu([0-9]+)([0-9])")
    set(Libtorch_CUDA ON)
    set(Libtorch_CUDA_MAJOR ${CMAKE_MATCH_1})
    set(Libtorch_CUDA_VERSION ${CMAKE_MATCH_1}.${CMAKE_MATCH_2})
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libtorch
  REQUIRED_VARS OCTAVO_TORCH_DIR VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "no torch found: set OCTAVO_TORCH_DIR to its folder (with pip: --no-build-isolation)")

if(Libtorch_FOUND AND NOT TARGET octavo::libtorch)
  add_library(octavo::libtorch INTERFACE IMPORTED)
  target_include_directories(octavo::libtorch SYSTEM INTERFACE
    ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
  target_link_libraries(octavo::libtorch INTERFACE
    ${torch_dir}/lib/libtorch.so ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so)
  if(Libtorch_CUDA)
    add_library(octavo::libtorch_cuda INTERFACE IMPORTED)
    target_link_libraries(octavo::libtorch_cuda INTERFACE
      octavo::libtorch ${torch_dir}/lib/libtorch_cuda.so ${torch_dir}/lib/libc10_cuda.so)
  endif()
endif()
