// Lets a CPU build of torch compute with tensors on device `cuda`: each operator runs its CPU kernel on the same
// memory. guard.cpp has to be loaded too.
#include <cstring>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

namespace {

using c10::Device, c10::DeviceType, c10::Storage, c10::StorageImpl, c10::TensorImpl;

// The memory of a storage, for another device. It lives as long as one of the two.
c10::DataPtr shared(const Storage& storage, Device device) {
  auto free = [](void* kept) { delete static_cast<Storage*>(kept); };
  return {storage.mutable_data(), new Storage(storage), free, device};
}

Storage moved(const Storage& storage, Device device) {
  auto* allocator = c10::GetCPUAllocator();
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), shared(storage, device), allocator, /*resizable=*/true);
}

at::Tensor over(const at::Tensor& like, Storage storage) {
  auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

// The arguments of one operator on the CPU, and what they were on the device.
struct Call {
  Device device{DeviceType::CUDA, -1};
  std::unordered_map<TensorImpl*, at::Tensor> tensors;
  std::unordered_map<StorageImpl*, Storage> storages, hosts;
  std::vector<at::Tensor> kept;

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (device.index() < 0) device = tensor.device();
    TORCH_CHECK(tensor.device() == device, "tensors are on ", device, " and on ", tensor.device());
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    auto found = hosts.find(impl);
    if (found == hosts.end()) found = hosts.emplace(impl, moved(tensor.storage(), Device(DeviceType::CPU))).first;
    auto host = over(tensor, found->second);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.emplace(host.unsafeGetTensorImpl(), tensor);
    storages.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
    kept.push_back(host);
    return host;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    if (auto found = tensors.find(tensor.unsafeGetTensorImpl()); found != tensors.end()) return found->second;
    auto found = storages.find(tensor.storage().unsafeGetStorageImpl());
    if (found != storages.end()) return over(tensor, found->second);
    if (device.index() < 0) device = c10::Device(DeviceType::CUDA, 0);
    auto storage = moved(tensor.storage(), device);
    storages.emplace(tensor.storage().unsafeGetStorageImpl(), storage);
    return over(tensor, storage);
  }

  // Give the device what the operator has resized.
  void follow() {
    for (auto& [impl, host] : hosts) {
      if (impl->data() == host.data() && impl->nbytes() == host.nbytes()) continue;
      impl->set_data_ptr_noswap(shared(host, impl->device()));
      impl->set_nbytes(host.nbytes());
    }
    for (auto& [host, tensor] : tensors) {
      if (tensor.sizes() == host->sizes() && tensor.strides() == host->strides()) continue;
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
    }
  }

  c10::IValue map(const c10::IValue& value, bool host) {
    if (value.isTensor()) return host ? to_host(value.toTensor()) : to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const at::Tensor& one : value.toTensorVector()) out.push_back(host ? to_host(one) : to_device(one));
      return out;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> out;
      for (const auto& one : value.toOptionalTensorList()) {
        std::optional<at::Tensor> tensor = one;
        out.push_back(tensor ? std::optional(host ? to_host(*tensor) : to_device(*tensor)) : std::nullopt);
      }
      return out;
    }
    if (host && value.isDevice() && value.toDevice().is_cuda()) {
      if (device.index() < 0 && value.toDevice().has_index()) device = value.toDevice();
      return Device(DeviceType::CPU);
    }
    return value;
  }
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const auto inputs = op.schema().arguments().size();
  for (auto at = stack->size() - inputs; at < stack->size(); ++at) (*stack)[at] = call.map((*stack)[at], true);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.follow();
  const auto outputs = op.schema().returns().size();
  for (auto at = stack->size() - outputs; at < stack->size(); ++at) (*stack)[at] = call.map((*stack)[at], false);
}

at::Tensor host(const at::Tensor& tensor) {
  return over(tensor, moved(tensor.storage(), Device(DeviceType::CPU)));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto from = source.is_cuda() ? host(source) : source;
  if (!self.is_cuda()) return self.copy_(from, non_blocking);
  host(self).copy_(from, non_blocking);
  return self;
}

void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  auto fresh = at::empty({bytes}, at::kByte);
  if (auto common = std::min<size_t>(bytes, impl->nbytes())) std::memcpy(fresh.data_ptr(), impl->data(), common);
  impl->set_data_ptr_noswap(shared(fresh.storage(), impl->device()));
  impl->set_nbytes(bytes);
}

at::Tensor& set_all(at::Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, Storage source) {
  const int64_t elements = source.nbytes() / self.itemsize();
  return set_all(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_all(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Operators that only CUDA has: products of 16-bit numbers that keep their sums in float32.
at::Tensor& mm_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType type, at::Tensor& out) {
  return out.copy_(at::mm(a.to(type), b.to(type)));
}

at::Tensor& addmm_out(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType type, const at::Scalar& beta,
    const at::Scalar& alpha, at::Tensor& out) {
  return out.copy_(at::addmm(self.to(type), a.to(type), b.to(type), beta, alpha));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_all);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("mm.dtype_out", &mm_out);
  library.impl("addmm.dtype_out", &addmm_out);
}

TORCH_LIBRARY(simulated, library) {
  library.def("host(Tensor x) -> Tensor");
  library.def("resize_storage(Tensor x, int bytes) -> ()");
  library.impl("host", c10::DispatchKey::CUDA, &host);
  library.impl("resize_storage", c10::DispatchKey::CUDA, &resize_storage);
}

}  // namespace
