// Lets a torch that was built without CUDA believe, as far as its dispatcher and autograd's engine ask, that there are
// GPUs: a device guard whose current device is each thread's own, as CUDA's is, and hooks that answer yes. No kernel
// runs on them; `pretended_gpu.py` computes on the CPU. It must be loaded before torch first asks for CUDA's hooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());
c10::DeviceIndex num_devices = 0;

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return Guard::getDeviceIndex(); }
};

}  // namespace

namespace at {
using ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at

// DistributedDataParallel's logger asks for a timer of the model's device.
namespace c10d {
struct NoTimer : Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}  // namespace c10d

extern "C" void pretend_devices(int number) { num_devices = number; }
extern "C" void set_current_device(int index) { Guard::setDeviceIndex(index); }
extern "C" int current_device() { return Guard::getDeviceIndex(); }
