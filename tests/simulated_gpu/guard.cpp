// Lets a CPU build of torch record and compute gradients of tensors on device `cuda`: hooks and a device guard that do
// nothing. Torch looks for both once, when it is loaded, so this library is loaded before it (LD_PRELOAD).
#include <utility>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

constexpr DeviceIndex devices = 8;
thread_local DeviceIndex current = 0;

// Devices with one stream each. Autograd asks for the current stream and records events on it.
struct SimulatedGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, current); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device exchangeDevice(Device chosen) const override {
    auto before = device();
    setDevice(chosen);
    return before;
  }
  void setDevice(Device chosen) const override { current = chosen.index() < 0 ? current : chosen.index(); }
  void uncheckedSetDevice(Device chosen) const noexcept override { setDevice(chosen); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard);

}  // namespace c10::impl

namespace at {

// Torch looks for hooks of this name.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return c10::impl::devices; }
  DeviceIndex deviceCount() const override { return c10::impl::devices; }
  DeviceIndex current_device() const override { return c10::impl::current; }
  DeviceIndex getCurrentDevice() const override { return c10::impl::current; }
  void setCurrentDevice(DeviceIndex chosen) const override { c10::impl::current = chosen; }
  DeviceIndex exchangeDevice(DeviceIndex chosen) const override { return std::exchange(c10::impl::current, chosen); }
  DeviceIndex maybeExchangeDevice(DeviceIndex chosen) const override { return exchangeDevice(chosen); }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
